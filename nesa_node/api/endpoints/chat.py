"""Endpoint `POST /v1/chat/completions`, which answers with one JSON object or with chunks."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter
from msgspec import Raw
from starlette.responses import Response

from nesa_node.api.gateway import (
    Gateway,
    GatewayOf,
    PendingResponse,
    UsageCounter,
    UsageOf,
    system_fingerprint,
)
from nesa_node.api.generation.job import Delta, Job, PrefillDone
from nesa_node.api.generation.tokenization import offload_if_large
from nesa_node.api.models.jobs import JobContext, RunJobs, check_prompt
from nesa_node.api.openapi import ChatCompletion, ChatCompletionChunk, describe
from nesa_node.api.responses.http_responses import DONE_EVENT, new_id, sse_event
from nesa_node.api.responses.token_logprobs import encode_chat_logprobs, reserve_logprobs
from nesa_node.api.schemas.chat_request import ChatCompletionRequest, Tool, ToolChoice
from nesa_node.api.schemas.chat_template import chat_prompt, find_template
from nesa_node.api.schemas.generation_request import (
    GrammarCheck,
    check_grammar,
    checked_grammar,
    requested_schema,
    resolve_max_tokens,
)
from nesa_node.api.schemas.request_body import body_dependency
from nesa_node.api.schemas.tool_calls import ToolCallParser, detect_call_format, forced_call_grammar
from nesa_node.web.authenticator import current_caller
from nesa_node.web.problem import invalid_request

if TYPE_CHECKING:
    from nesa_node.api.models.served_model import ServedModel


@dataclass(slots=True)
class _ChatChoice:
    """State of one choice; `parser` is set if the answer may call tools."""

    parser: ToolCallParser | None
    text: list[str] = field(default_factory=list)
    logprobs: list[Raw] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def parse(self, delta: Delta) -> tuple[str, list[dict[str, Any]], str | None]:
        """Text, tool calls and finish reason that `delta` adds."""
        text, reason = delta.text, delta.finish_reason
        calls: list[dict[str, Any]] = []
        if self.parser is not None:
            text = self.parser.feed(text)
            if reason is not None:
                rest, calls = self.parser.finish()
                text += rest
        return text, calls, "tool_calls" if calls else reason

    def append(self, delta: Delta, *, with_logprobs: bool) -> None:
        text, calls, reason = self.parse(delta)
        self.text.append(text)
        if with_logprobs:
            self.logprobs += encode_chat_logprobs(delta.tokens)
        self.tool_calls += calls
        self.finish_reason = reason


class ChatCompletionBuilder:
    """Builder of the response to one chat request."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        *,
        n: int,
        with_logprobs: bool,
        usage: UsageCounter,
        make_parser: Callable[[], ToolCallParser] | None = None,
    ) -> None:
        self._n = n
        self._logprobs = with_logprobs
        self._usage = usage
        self._footer: dict[str, Any] = {}
        self._choices = [_ChatChoice(make_parser and make_parser()) for _ in range(n)]
        self._header = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    async def build_json(self, run: RunJobs) -> dict[str, Any]:
        async with self._usage.charge_prompt_on_cancel(), run() as events:
            async for _, event in events:
                self._usage.count(event)
                if isinstance(event, Delta):
                    self._choices[event.index].append(event, with_logprobs=self._logprobs)
        choices = [self._choice_object(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._header, "choices": choices, "usage": self._usage.to_json()}

    async def stream_chunks(self, run: RunJobs, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
        self._header["object"] = "chat.completion.chunk"
        # OpenAI sends `"usage": null` in chunks only if `include_usage` is set.
        self._footer = {"usage": None} if with_usage else {}
        async with self._usage.charge_prompt_on_cancel(), run() as events:
            async for _, event in events:
                self._usage.count(event)
                if isinstance(event, PrefillDone):
                    for index in range(self._n):
                        yield self._chunk_event(index, {"role": "assistant", "content": ""})
                if isinstance(event, Delta):
                    for data in self._delta_chunks(event):
                        yield data
        if with_usage:
            yield sse_event({**self._header, "choices": [], "usage": self._usage.to_json()})
        yield DONE_EVENT

    def _delta_chunks(self, delta: Delta) -> list[bytes]:
        text, calls, reason = self._choices[delta.index].parse(delta)
        logprobs = None
        if self._logprobs and delta.tokens:
            logprobs = _logprobs_object(encode_chat_logprobs(delta.tokens))
        chunks = []
        if text or logprobs is not None:
            chunks.append(self._chunk_event(delta.index, {"content": text}, logprobs=logprobs))
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            chunks.append(self._chunk_event(delta.index, {"tool_calls": numbered}))
        if reason is not None:
            chunks.append(self._chunk_event(delta.index, {}, finish_reason=reason))
        return chunks

    def _chunk_event(self, index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return sse_event({**self._header, "choices": [choice], **self._footer})

    def _choice_object(self, index: int, choice: _ChatChoice) -> dict[str, Any]:
        text = "".join(choice.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not choice.tool_calls else None,
            "refusal": None,
        }
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs_object(choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish_reason or "stop",
        }


def _logprobs_object(entries: list[Raw]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}


router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **describe("Answer a conversation", ChatCompletionRequest, ChatCompletion, ChatCompletionChunk),
)
async def chat(
    gateway: GatewayOf,
    usage: UsageOf,
    body: Annotated[ChatCompletionRequest, body_dependency(ChatCompletionRequest)],
) -> Response:
    tools = callable_tools(body)
    prepare = partial(_prepare, gateway, usage, body, tools)
    return gateway.respond(body.model, prepare, stream=bool(body.stream))


async def _prepare(
    gateway: Gateway,
    usage: UsageCounter,
    body: ChatCompletionRequest,
    tools: list[Tool],
    model: ServedModel,
) -> PendingResponse:
    job = await make_chat_job(gateway.job_context(body.model), model, body)
    reserve_logprobs([job], is_private=model.is_private, param="top_logprobs")
    make_parser = tool_call_parser(model, tools) if tools else None

    def new_answer() -> ChatCompletionBuilder:
        return ChatCompletionBuilder(
            body.model or model.name,
            system_fingerprint(model.model_id),
            n=job.n,
            with_logprobs=job.top_logprobs is not None,
            usage=usage.start(model.name, len(job.prompt)),
            make_parser=make_parser,
        )

    run = gateway.job_runner(model, [job])
    return PendingResponse(
        lambda: new_answer().build_json(run),
        lambda: new_answer().stream_chunks(run, with_usage=body.wants_usage),
        usage,
    )


def callable_tools(body: ChatCompletionRequest) -> list[Tool]:
    """Tools that the model may call. Raises `HttpProblem` for a `tool_choice` without tools."""
    tools = body.tools or []
    if not tools and body.tool_choice not in (None, "none", "auto"):
        raise invalid_request("tool_choice needs tools", param="tool_choice")
    return [] if body.tool_choice == "none" else tools


def tool_call_parser(model: ServedModel, tools: list[Tool]) -> partial[ToolCallParser]:
    """Maker of parsers for answers that may call `tools`."""
    written = detect_call_format(find_template(model.tokenizer, True))
    return partial(ToolCallParser, written, [tool.function.name for tool in tools])


async def make_chat_job(
    context: JobContext, model: ServedModel, body: ChatCompletionRequest
) -> Job:
    """The request's job. Raises `HttpProblem` for a request that cannot be served."""
    tools = callable_tools(body)
    asked = body.requested_max_tokens()
    n = body.n or 1
    top, sampling = body.requested_logprobs(), body.sampling(model.vocab_size, model.defaults)
    grammar = await _answer_grammar(model, body, tools, context.check_grammar)
    prompt = await chat_prompt(
        model.tokenizer,
        body.messages,
        tools,
        max_tokens=model.context_length,
        render=context.render,
    )
    return Job(
        prompt=check_prompt(model, prompt, "messages"),
        max_tokens=resolve_max_tokens(
            prompt, asked, model.context_length, context.config, choices=n, param="messages"
        ),
        n=n,
        sampling=sampling,
        stop=body.stop_texts(),
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=top,
        prefix_scope=current_caller(),
        grammar=grammar,
        adapter=context.adapter,
    )


async def _answer_grammar(
    model: ServedModel, body: ChatCompletionRequest, tools: list[Tool], check: GrammarCheck
) -> str | None:
    """Grammar of the requested response format, or of a tool call that `tool_choice` requires."""
    choice = body.tool_choice
    if tools and (choice == "required" or isinstance(choice, ToolChoice)):
        written = detect_call_format(find_template(model.tokenizer, True))
        grammar = await offload_if_large(
            math.inf, lambda: forced_call_grammar(written, tools, choice)
        )
        await check_grammar(grammar, "tools", check)
        return grammar
    return await checked_grammar(requested_schema(body.response_format), "response_format", check)
