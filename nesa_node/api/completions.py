"""Endpoint `POST /v1/completions`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter
from starlette.responses import Response

from nesa_node.api.answering.chances import take_room_for
from nesa_node.api.answering.completion_answer import CompletionAnswer
from nesa_node.api.bodies.completion_body import CompletionBody
from nesa_node.api.bodies.formats import grammar_of, schema_of
from nesa_node.api.bodies.reading import body_of
from nesa_node.api.bodies.sampling_body import room_for
from nesa_node.api.bodies.splitting import join
from nesa_node.api.decoding.job import Job
from nesa_node.api.gateway import Answers, CallerOf, Gateway, GatewayOf, Meter, SpendOf, fingerprint
from nesa_node.api.openapi import Completion, describe
from nesa_node.api.serving.jobs import running
from nesa_node.api.serving.prompts import all_tokens_of

if TYPE_CHECKING:
    from nesa_node.api.serving.served_model import ServedModel

DEFAULT_TOKENS = 16
"""OpenAI's default of `max_tokens`."""

router = APIRouter()


@router.post(
    "/v1/completions",
    **describe("Continue a text", CompletionBody, Completion, Completion),
)
async def complete(
    gateway: GatewayOf,
    caller: CallerOf,
    spend: SpendOf,
    body: Annotated[CompletionBody, body_of(CompletionBody)],
) -> Response:
    body.check()
    prepare = partial(_prepared, gateway, caller, spend, body)
    return gateway.answer(body.model, prepare, stream=bool(body.stream))


async def _prepared(
    gateway: Gateway, caller: str, spend: Meter, body: CompletionBody, model: ServedModel
) -> Answers:
    prompts = body.prompts()
    jobs = await _jobs(gateway, model, body, prompts, caller)
    take_room_for(jobs, param="logprobs")
    answer = CompletionAnswer(
        body.model or model.name,
        fingerprint(model.model_id),
        n=body.n or 1,
        prompts=len(jobs),
        echoes=await _texts(model, prompts) if body.echo else None,
        logprobs=body.logprobs is not None,
        usage=spend.usage(model.name, sum(len(job.prompt) for job in jobs)),
    )
    run = partial(running, model, jobs, gateway.watch)
    return Answers(
        partial(answer.whole, run), partial(answer.chunks, run, with_usage=body.wants_usage)
    )


async def _jobs(
    gateway: Gateway,
    model: ServedModel,
    body: CompletionBody,
    prompts: list[str | list[int]],
    caller: str,
) -> list[Job]:
    sampling = body.sampling(model.vocab_size, model.defaults)
    check = partial(gateway.grammars.check, caller=caller)
    grammar = await grammar_of(schema_of(body.response_format), "response_format", check)
    asked = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    return [
        Job(
            prompt=tokens,
            max_tokens=room_for(
                len(tokens),
                asked,
                context_length=model.context_length,
                cap=gateway.config.max_new_tokens,
                default=None,
                param="prompt",
            ),
            n=body.n or 1,
            sampling=sampling,
            stop=body.stops(),
            ignore_eos=bool(body.ignore_eos),
            top_logprobs=body.logprobs,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
            prefix_scope=caller,
            grammar=grammar,
        )
        for tokens in await all_tokens_of(model, prompts, "prompt")
    ]


async def _texts(model: ServedModel, prompts: list[str | list[int]]) -> list[str]:
    tokens = [prompt for prompt in prompts if not isinstance(prompt, str)]
    joined = iter(await join(model.tokenizer, tokens, param="prompt"))
    return [prompt if isinstance(prompt, str) else next(joined) for prompt in prompts]
