"""Endpoint `POST /v1/completions`, which answers with one JSON object or with chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter
from starlette.responses import Response

from nesa_node.api.gateway import (
    Gateway,
    GatewayOf,
    PendingResponse,
    UsageCounter,
    UsageOf,
    system_fingerprint,
)
from nesa_node.api.generation.job import Delta, Job, PrefillDone, SessionEnd
from nesa_node.api.generation.tokenization import decode_all, offload_if_large
from nesa_node.api.models.jobs import JobContext, JobEvent, RunJobs, tokenize_prompts
from nesa_node.api.openapi import Completion, describe
from nesa_node.api.responses.http_responses import DONE_EVENT, new_id, sse_event
from nesa_node.api.responses.token_logprobs import CompletionLogprobsEncoder, reserve_logprobs
from nesa_node.api.schemas.generation_request import (
    CompletionRequest,
    checked_grammar,
    requested_schema,
    resolve_max_tokens,
)
from nesa_node.api.schemas.request_body import body_dependency
from nesa_node.web.authenticator import current_caller

if TYPE_CHECKING:
    from nesa_node.api.models.served_model import ServedModel


_ChoiceUpdate = tuple[int, str, dict[str, Any] | None, str | None]


@dataclass(slots=True)
class _CompletionChoice:
    encoder: CompletionLogprobsEncoder | None
    text: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None

    def append(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> None:
        self.text.append(text)
        for key, values in (logprobs or {}).items():
            self.logprobs.setdefault(key, []).extend(values)
        self.finish_reason = reason or self.finish_reason


class CompletionBuilder:
    """Builder of the response to one completion request.

    Choice `p * n + i` is answer `i` to prompt `p`. `echoes` are the prompts' texts, with `echo`.
    """

    def __init__(
        self,
        model: str,
        fingerprint: str,
        *,
        n: int,
        prompts: int,
        echoes: Sequence[str] | None,
        with_logprobs: bool,
        usage: UsageCounter,
    ) -> None:
        self._n = n
        self._echoes = echoes
        self._usage = usage
        self._choices = [
            _CompletionChoice(CompletionLogprobsEncoder() if with_logprobs else None)
            for _ in range(n * prompts)
        ]
        self._header = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    async def build_json(self, run: RunJobs) -> dict[str, Any]:
        async with self._usage.charge_prompt_on_cancel(), run() as events:
            async for tagged in events:
                for index, text, logprobs, reason in await self._choice_updates(tagged):
                    self._choices[index].append(text, logprobs, reason)
        choices = [
            _choice_object(
                index,
                "".join(choice.text),
                choice.logprobs if choice.encoder else None,
                choice.finish_reason or "length",
            )
            for index, choice in enumerate(self._choices)
        ]
        return {**self._header, "choices": choices, "usage": self._usage.to_json()}

    async def stream_chunks(self, run: RunJobs, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
        rest: dict[str, Any] = {"usage": None} if with_usage else {}
        async with self._usage.charge_prompt_on_cancel(), run() as events:
            async for tagged in events:
                for update in await self._choice_updates(tagged):
                    if any(update[1:]):
                        yield sse_event(
                            {**self._header, "choices": [_choice_object(*update)], **rest}
                        )
        if with_usage:
            yield sse_event({**self._header, "choices": [], "usage": self._usage.to_json()})
        yield DONE_EVENT

    async def _choice_updates(self, tagged: JobEvent) -> list[_ChoiceUpdate]:
        """Index, text, log probabilities and finish reason of the choices it updates."""
        job, event = tagged
        self._usage.count(event)
        if isinstance(event, Delta):
            index = job * self._n + event.index
            chances = self._choices[index].encoder
            logprobs = chances.encode(event.tokens) if chances and event.tokens else None
            return [(index, event.text, logprobs, event.finish_reason)]
        if isinstance(event, SessionEnd):
            return []
        # A prompt may have many log probabilities, which come in one event.
        size = self._n * sum(1 + len(token.top) for token in event.tokens)
        return await offload_if_large(size, lambda: self._echo_updates(job, event))

    def _echo_updates(self, job: int, event: PrefillDone) -> list[_ChoiceUpdate]:
        if self._echoes is None:
            return []
        updates: list[_ChoiceUpdate] = []
        for index in range(job * self._n, (job + 1) * self._n):
            chances = self._choices[index].encoder
            logprobs = chances.encode(event.tokens, is_text_start=True) if chances else None
            updates.append((index, self._echoes[job], logprobs, None))
        return updates


def _choice_object(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens`."""

router = APIRouter()


@router.post(
    "/v1/completions",
    **describe("Continue a text", CompletionRequest, Completion, Completion),
)
async def complete(
    gateway: GatewayOf,
    usage: UsageOf,
    body: Annotated[CompletionRequest, body_dependency(CompletionRequest)],
) -> Response:
    body.check_fields()
    prepare = partial(_prepare, gateway, usage, body)
    return gateway.respond(body.model, prepare, stream=bool(body.stream))


async def _prepare(
    gateway: Gateway, usage: UsageCounter, body: CompletionRequest, model: ServedModel
) -> PendingResponse:
    prompts = body.prompts()
    jobs = await make_completion_jobs(gateway.job_context(body.model), model, body)
    reserve_logprobs(jobs, is_private=model.is_private, param="logprobs")
    echoes = await _prompt_texts(model, prompts) if body.echo else None
    asked = sum(len(job.prompt) for job in jobs)

    def new_answer() -> CompletionBuilder:
        return CompletionBuilder(
            body.model or model.name,
            system_fingerprint(model.model_id),
            n=body.n or 1,
            prompts=len(jobs),
            echoes=echoes,
            with_logprobs=body.logprobs is not None,
            usage=usage.start(model.name, asked),
        )

    run = gateway.job_runner(model, jobs)
    return PendingResponse(
        lambda: new_answer().build_json(run),
        lambda: new_answer().stream_chunks(run, with_usage=body.wants_usage),
        usage,
    )


async def make_completion_jobs(
    context: JobContext, model: ServedModel, body: CompletionRequest
) -> list[Job]:
    """A job for each prompt. Raises `HttpProblem` for a request that cannot be served."""
    sampling = body.sampling(model.vocab_size, model.defaults)
    grammar = await checked_grammar(
        requested_schema(body.response_format), "response_format", context.check_grammar
    )
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return [
        Job(
            prompt=tokens,
            max_tokens=resolve_max_tokens(
                tokens, asked, model.context_length, context.config, param="prompt"
            ),
            n=body.n or 1,
            sampling=sampling,
            stop=body.stop_texts(),
            ignore_eos=bool(body.ignore_eos),
            top_logprobs=body.logprobs,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
            prefix_scope=current_caller(),
            grammar=grammar,
            adapter=context.adapter,
        )
        for tokens in await tokenize_prompts(model, body.prompts(), "prompt")
    ]


async def _prompt_texts(model: ServedModel, prompts: list[str | list[int]]) -> list[str]:
    tokens = [prompt for prompt in prompts if not isinstance(prompt, str)]
    joined = iter(await decode_all(model.tokenizer, tokens, param="prompt"))
    return [prompt if isinstance(prompt, str) else next(joined) for prompt in prompts]
