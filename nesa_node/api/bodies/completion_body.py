"""Request body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from nesa_node.api.bodies.fields import (
    CountOrNone,
    Nothing,
    Text,
    TokenId,
    TopLogprobs,
)
from nesa_node.api.bodies.formats import ResponseFormat
from nesa_node.api.bodies.sampling_body import MAX_CHOICES, Choices, Metadata, Sampled
from nesa_node.web.problem import Problem

MAX_TOKENS = 1 << 20

Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
Prompt = (
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    | Tokens
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
)


class CompletionBody(Sampled):
    prompt: Prompt
    max_tokens: CountOrNone | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None
    response_format: ResponseFormat | None = None

    suffix: Nothing = None
    metadata: Metadata | None = None
    store: bool | None = None

    def check(self) -> None:
        """Raise `Problem` for fields that contradict each other or exceed limits."""
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise Problem(
                400,
                "best_of: every answer that is generated is returned; give n alone",
                code="unsupported_parameter",
                param="best_of",
            )
        if self.max_tokens == 0 and not self.echo:
            raise Problem(
                400,
                "max_tokens: 0 asks for nothing unless echo is set",
                code="invalid_value",
                param="max_tokens",
            )
        if n * len(self.prompts()) > MAX_CHOICES:
            raise Problem(
                400,
                f"n: at most {MAX_CHOICES} answers at once, over all prompts",
                code="invalid_value",
                param="n",
            )

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one for each job."""
        return as_list(self.prompt)


def as_list(value: Prompt) -> list[str | list[int]]:
    """List of prompts from a text, a list of texts, a list of tokens, or a list of such lists."""
    if isinstance(value, str):
        return [value]
    many: list[Any] = list(value)
    return [many] if isinstance(many[0], int) else many
