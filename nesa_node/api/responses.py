"""Endpoint `POST /v1/responses`: text only, and without state between requests."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter
from starlette.responses import Response

from nesa_node.api.answering.chances import take_room_for
from nesa_node.api.answering.response_answer import ResponseAnswer
from nesa_node.api.bodies.formats import grammar_of
from nesa_node.api.bodies.reading import body_of
from nesa_node.api.bodies.response_body import ResponseBody
from nesa_node.api.bodies.sampling_body import room_for
from nesa_node.api.bodies.templates import chat_prompt
from nesa_node.api.decoding.job import Job
from nesa_node.api.gateway import Answers, CallerOf, Gateway, GatewayOf, Meter, SpendOf
from nesa_node.api.openapi import ModelResponse, ResponseEvent, describe
from nesa_node.api.serving.jobs import running
from nesa_node.api.serving.prompts import checked_prompt

if TYPE_CHECKING:
    from nesa_node.api.serving.served_model import ServedModel

router = APIRouter()


@router.post(
    "/v1/responses", **describe("Answer in text", ResponseBody, ModelResponse, ResponseEvent)
)
async def respond(
    gateway: GatewayOf,
    caller: CallerOf,
    spend: SpendOf,
    body: Annotated[ResponseBody, body_of(ResponseBody)],
) -> Response:
    prepare = partial(_prepared, gateway, caller, spend, body)
    return gateway.answer(body.model, prepare, stream=bool(body.stream))


async def _prepared(
    gateway: Gateway, caller: str, spend: Meter, body: ResponseBody, model: ServedModel
) -> Answers:
    job = await _job(gateway, model, body, caller)
    take_room_for([job], param="top_logprobs")
    # The answer does not repeat the input, so its memory is freed.
    body = body.model_copy(update={"model": body.model or model.name, "input": ""})
    answer = ResponseAnswer(body, job, usage=spend.usage(model.name, len(job.prompt)))
    run = partial(running, model, [job], gateway.watch)
    return Answers(partial(answer.whole, run), partial(answer.events, run), answer.failed)


async def _job(gateway: Gateway, model: ServedModel, body: ResponseBody, caller: str) -> Job:
    top = body.top()
    schema = None if body.text is None else body.text.wanted()
    grammar = await grammar_of(
        schema, "text.format", partial(gateway.grammars.check, caller=caller)
    )
    prompt = await chat_prompt(
        model.tokenizer,
        body.messages(),
        most=model.context_length,
        param="input",
        render=gateway.render(caller),
    )
    return Job(
        prompt=checked_prompt(model, prompt, "input"),
        max_tokens=room_for(
            len(prompt),
            body.max_output_tokens,
            context_length=model.context_length,
            cap=gateway.config.max_new_tokens,
            default=gateway.config.default_new_tokens,
            param="input",
        ),
        sampling=body.sampling(model.defaults),
        top_logprobs=top,
        prefix_scope=caller,
        grammar=grammar,
    )
