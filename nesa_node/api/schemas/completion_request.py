"""Request body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from nesa_node.api.schemas.request_body import CountOrZero, OnlyNull, Text, TokenId, TopLogprobs
from nesa_node.api.schemas.response_format import ResponseFormat
from nesa_node.api.schemas.sampling import MAX_CHOICES, ChoiceCount, Metadata, SamplingRequest
from nesa_node.web.problem import HttpProblem

MAX_PROMPT_TOKENS = 1 << 20

Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
Prompt = (
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    | Tokens
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
)


class CompletionRequest(SamplingRequest):
    prompt: Prompt
    max_tokens: CountOrZero | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: ChoiceCount | None = None
    response_format: ResponseFormat | None = None

    suffix: OnlyNull = None
    metadata: Metadata | None = None
    store: bool | None = None

    def check_fields(self) -> None:
        """Raise `HttpProblem` for fields that contradict each other or exceed limits."""
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise HttpProblem(
                400,
                "best_of: every answer that is generated is returned; give n alone",
                code="unsupported_parameter",
                param="best_of",
            )
        if self.max_tokens == 0 and not self.echo:
            raise HttpProblem(
                400,
                "max_tokens: 0 asks for nothing unless echo is set",
                code="invalid_value",
                param="max_tokens",
            )
        if n * len(self.prompts()) > MAX_CHOICES:
            raise HttpProblem(
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
