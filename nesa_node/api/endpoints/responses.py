"""Endpoint `POST /v1/responses`: text only, and without state between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter
from msgspec import Raw
from starlette.responses import Response

from nesa_node.api.gateway import Gateway, GatewayOf, PendingResponse, UsageCounter, UsageOf
from nesa_node.api.generation.job import Delta, GenerationEvent, Job, PrefillDone
from nesa_node.api.models.jobs import JobContext, RunJobs, check_prompt
from nesa_node.api.openapi import ResponseEvent, ResponseObject, describe
from nesa_node.api.responses.http_responses import named_sse_event, new_id
from nesa_node.api.responses.token_logprobs import encode_chat_logprobs, reserve_logprobs
from nesa_node.api.schemas.chat_template import chat_prompt
from nesa_node.api.schemas.generation_request import checked_grammar, resolve_max_tokens
from nesa_node.api.schemas.request_body import body_dependency
from nesa_node.api.schemas.responses_request import ResponsesRequest
from nesa_node.web.authenticator import current_caller
from nesa_node.web.problem import HttpProblem

if TYPE_CHECKING:
    from nesa_node.api.models.served_model import ServedModel


class ResponseBuilder:
    """Builder of a response with one message of one part; `sequence_number` counts its events."""

    def __init__(self, body: ResponsesRequest, job: Job, *, usage: UsageCounter) -> None:
        self._body = body
        self._sampling = job.sampling
        self._with_logprobs = job.top_logprobs is not None
        self._usage = usage
        self._id = new_id("resp_")
        self._item_id = new_id("msg_")
        self._created_at = int(time.time())
        self._text: list[str] = []
        self._token_logprobs: list[Raw] = []
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._event_count = 0

    async def build_json(self, run: RunJobs) -> dict[str, Any]:
        async with self._usage.charge_prompt_on_cancel(), run() as events:
            async for _, event in events:
                self._append(event)
        return self._response_object()

    async def stream_events(self, run: RunJobs) -> AsyncGenerator[bytes, None]:
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        async with self._usage.charge_prompt_on_cancel(), run() as events:
            async for _, event in events:
                logprobs = self._append(event)
                if isinstance(event, PrefillDone):
                    for data in self._opening_events(at):
                        yield data
                elif isinstance(event, Delta) and (event.text or logprobs):
                    yield self._event(
                        "response.output_text.delta", **at, delta=event.text, logprobs=logprobs
                    )
        for data in self._closing_events(at):
            yield data

    def failed_event(self, problem: HttpProblem) -> bytes:
        """Last event of a stream that failed."""
        self._status = "failed"
        self._error = {"code": problem.code or "server_error", "message": problem.message}
        return self._event("response.failed", response=self._response_object())

    def _append(self, event: GenerationEvent) -> list[Raw]:
        """Add an event to the response; return its log probabilities."""
        self._usage.count(event)
        if not isinstance(event, Delta):
            return []
        self._text.append(event.text)
        logprobs = encode_chat_logprobs(event.tokens) if self._with_logprobs else []
        self._token_logprobs += logprobs
        if event.finish_reason is not None:
            self._status = "incomplete" if event.finish_reason == "length" else "completed"
        return logprobs

    def _opening_events(self, at: dict[str, Any]) -> list[bytes]:
        item = {**self._output_item(), "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.created", response=self._response_object()),
            self._event("response.in_progress", response=self._response_object()),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **at, part=part),
        ]

    def _closing_events(self, at: dict[str, Any]) -> Iterator[bytes]:
        part = self._output_part()
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        # Yielded one by one: each of these events holds the whole answer.
        yield self._event("response.output_text.done", **at, **done)
        yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=0, item=self._output_item())
        yield self._event(f"response.{self._status}", response=self._response_object())

    def _event(self, kind: str, **data: Any) -> bytes:
        self._event_count += 1
        return named_sse_event({"type": kind, "sequence_number": self._event_count - 1, **data})

    def _output_part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": "".join(self._text),
            "annotations": [],
            "logprobs": self._token_logprobs,
        }

    def _output_item(self) -> dict[str, Any]:
        status = "completed" if self._status == "completed" else "incomplete"
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self._output_part()],
        }

    def _response_object(self) -> dict[str, Any]:
        body, running = self._body, self._status == "in_progress"
        format_ = None if body.text is None else body.text.format
        format_json: Any = {"type": "text"}
        if format_ is not None:
            format_json = format_.model_dump(by_alias=True, exclude_none=True)
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": [] if running else [self._output_item()],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            # Responses are never stored, whatever the request asked for.
            "store": False,
            "temperature": self._sampling.temperature,
            "text": {"format": format_json},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": None if running else self._usage_object(),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage_object(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.new_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.new_tokens,
            "nesa_audits": usage.audits(),
        }


router = APIRouter()


@router.post(
    "/v1/responses",
    **describe(
        "Answer in text",
        ResponsesRequest,
        ResponseObject,
        ResponseEvent,
        last_event="response.completed or response.incomplete",
    ),
)
async def respond(
    gateway: GatewayOf,
    usage: UsageOf,
    body: Annotated[ResponsesRequest, body_dependency(ResponsesRequest)],
) -> Response:
    prepare = partial(_prepare, gateway, usage, body)
    return gateway.respond(body.model, prepare, stream=bool(body.stream))


async def _prepare(
    gateway: Gateway, usage: UsageCounter, body: ResponsesRequest, model: ServedModel
) -> PendingResponse:
    job = await make_response_job(gateway.job_context(body.model), model, body)
    reserve_logprobs([job], is_private=model.is_private, param="top_logprobs")
    # The answer does not repeat the input, so its memory is freed.
    body = body.model_copy(update={"model": body.model or model.name, "input": ""})

    def new_answer() -> ResponseBuilder:
        return ResponseBuilder(body, job, usage=usage.start(model.name, len(job.prompt)))

    run, streamed = gateway.job_runner(model, [job]), new_answer()
    return PendingResponse(
        lambda: new_answer().build_json(run),
        lambda: streamed.stream_events(run),
        usage,
        streamed.failed_event,
    )


async def make_response_job(context: JobContext, model: ServedModel, body: ResponsesRequest) -> Job:
    """The request's job. Raises `HttpProblem` for a request that cannot be served."""
    top = body.requested_logprobs()
    schema = None if body.text is None else body.text.requested_schema()
    grammar = await checked_grammar(schema, "text.format", context.check_grammar)
    prompt = await chat_prompt(
        model.tokenizer,
        body.messages(),
        max_tokens=model.context_length,
        param="input",
        render=context.render,
    )
    return Job(
        prompt=check_prompt(model, prompt, "input"),
        max_tokens=resolve_max_tokens(
            prompt, body.max_output_tokens, model.context_length, context.config, param="input"
        ),
        sampling=body.sampling(model.defaults),
        top_logprobs=top,
        prefix_scope=current_caller(),
        grammar=grammar,
        adapter=context.adapter,
    )
