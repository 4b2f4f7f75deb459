"""Prompts as text or as tokens, for endpoints that take both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nesa_node.api.bodies.splitting import light, split
from nesa_node.web.problem import Problem

if TYPE_CHECKING:
    from nesa_node.api.serving.served_model import ServedModel


async def all_tokens_of(
    model: ServedModel, prompts: Sequence[str | list[int]], param: str
) -> list[tuple[int, ...]]:
    """Of each at least one token that the model has. Raises `Problem`.

    Many short ones hold up others as one long one does, so that all of them count together.
    """
    return await light(
        sum(map(len, prompts)),
        lambda: [_tokens_of(model, prompt, param) for prompt in prompts],
        takes_memory=any(isinstance(prompt, str) for prompt in prompts),
    )


def _tokens_of(model: ServedModel, prompt: str | list[int], param: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        most = model.context_length
        prompt = split(model.tokenizer, prompt, special=True, most=most, param=param)
        if not prompt and model.tokenizer.bos_token_id is not None:
            prompt = [model.tokenizer.bos_token_id]
    return checked_prompt(model, prompt, param)


def checked_prompt(model: ServedModel, prompt: Sequence[int], param: str) -> tuple[int, ...]:
    """A prompt to compute. Raises `Problem` where it has no tokens, as a chat template may make it,
    or tokens that the model lacks, as its tokenizer may."""
    if not prompt:
        raise Problem(400, f"{param}: it has no tokens", code="invalid_value", param=param)
    if max(prompt) >= model.vocab_size:
        raise Problem(
            400,
            f"{param}: the model has no token {max(prompt)}, its last is {model.vocab_size - 1}",
            code="invalid_value",
            param=param,
        )
    return tuple(prompt)
