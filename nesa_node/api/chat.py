"""Endpoint `POST /v1/chat/completions`."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter
from starlette.responses import Response

from nesa_node.api.answering.chances import take_room_for
from nesa_node.api.answering.chat_answer import ChatAnswer
from nesa_node.api.bodies.chat_body import ChatBody, NamedTool, Tool
from nesa_node.api.bodies.formats import Check, checked, grammar_of, schema_of
from nesa_node.api.bodies.reading import body_of
from nesa_node.api.bodies.sampling_body import room_for, same, shared
from nesa_node.api.bodies.splitting import light
from nesa_node.api.bodies.templates import chat_prompt, template_of
from nesa_node.api.bodies.tool_calls import CallReader, forced_calls, format_of
from nesa_node.api.decoding.job import Job
from nesa_node.api.gateway import (
    Answers,
    CallerOf,
    Gateway,
    GatewayOf,
    Meter,
    SpendOf,
    fingerprint,
)
from nesa_node.api.openapi import ChatCompletion, ChatCompletionChunk, describe
from nesa_node.api.serving.jobs import running
from nesa_node.api.serving.prompts import checked_prompt
from nesa_node.web.problem import Problem

if TYPE_CHECKING:
    from nesa_node.api.serving.served_model import ServedModel

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **describe("Answer a conversation", ChatBody, ChatCompletion, ChatCompletionChunk),
)
async def chat(
    gateway: GatewayOf,
    caller: CallerOf,
    spend: SpendOf,
    body: Annotated[ChatBody, body_of(ChatBody)],
) -> Response:
    tools = _tools(body)
    prepare = partial(_prepared, gateway, caller, spend, body, tools)
    return gateway.answer(body.model, prepare, stream=bool(body.stream))


async def _prepared(
    gateway: Gateway,
    caller: str,
    spend: Meter,
    body: ChatBody,
    tools: list[Tool],
    model: ServedModel,
) -> Answers:
    job = await _job(gateway, model, body, tools, caller)
    take_room_for([job], param="top_logprobs")
    answer = ChatAnswer(
        body.model or model.name,
        fingerprint(model.model_id),
        n=job.n,
        logprobs=job.top_logprobs is not None,
        usage=spend.usage(model.name, len(job.prompt)),
        reader=_reader(model, tools) if tools else None,
    )
    run = partial(running, model, [job], gateway.watch)
    return Answers(
        partial(answer.whole, run), partial(answer.chunks, run, with_usage=body.wants_usage)
    )


def _tools(body: ChatBody) -> list[Tool]:
    """Tools that the model may call. Raises `Problem` for a `tool_choice` without tools."""
    tools = body.tools or []
    if not tools and body.tool_choice not in (None, "none", "auto"):
        raise Problem(400, "tool_choice needs tools", code="invalid_value", param="tool_choice")
    return [] if body.tool_choice == "none" else tools


def _reader(model: ServedModel, tools: list[Tool]) -> partial[CallReader]:
    written = format_of(template_of(model.tokenizer, True))
    return partial(CallReader, written, [tool.function.name for tool in tools])


async def _job(
    gateway: Gateway, model: ServedModel, body: ChatBody, tools: list[Tool], caller: str
) -> Job:
    asked = same(
        body.max_tokens, body.max_completion_tokens, ("max_tokens", "max_completion_tokens")
    )
    top, sampling = body.top(), body.sampling(model.vocab_size, model.defaults)
    grammar = await _grammar(model, body, tools, partial(gateway.grammars.check, caller=caller))
    prompt = await chat_prompt(
        model.tokenizer,
        body.messages,
        tools,
        most=model.context_length,
        render=gateway.render(caller),
    )
    return Job(
        prompt=checked_prompt(model, prompt, "messages"),
        max_tokens=room_for(
            len(prompt),
            asked,
            context_length=model.context_length,
            cap=gateway.config.max_new_tokens,
            default=shared(gateway.config.default_new_tokens, body.n or 1),
            param="messages",
        ),
        n=body.n or 1,
        sampling=sampling,
        stop=body.stops(),
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=top,
        prefix_scope=caller,
        grammar=grammar,
    )


async def _grammar(
    model: ServedModel, body: ChatBody, tools: list[Tool], check: Check
) -> str | None:
    """Grammar of the requested response format, or of a tool call that `tool_choice` requires."""
    choice = body.tool_choice
    if tools and (choice == "required" or isinstance(choice, NamedTool)):
        written = format_of(template_of(model.tokenizer, True))
        grammar = await light(math.inf, lambda: forced_calls(written, tools, choice))
        await checked(grammar, "tools", check)
        return grammar
    return await grammar_of(schema_of(body.response_format), "response_format", check)
