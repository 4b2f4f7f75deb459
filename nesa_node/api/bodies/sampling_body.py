"""Fields shared by chats and completions: sampling parameters, stop texts, streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from nesa_node.api.bodies.fields import (
    Bias,
    Body,
    Label,
    MinP,
    ModelName,
    Only,
    Penalty,
    Repetition,
    Seed,
    Share,
    Temperature,
    TokenKey,
    TopK,
    Whole,
    few_entries,
)
from nesa_node.api.decoding.job import Sampling
from nesa_node.web.problem import Problem

MAX_CHOICES = 128
FEW_CHOICES = 4
MAX_STOPS = 16
"""Limit on stop texts: OpenAI allows 4, code editors send up to 14."""
_MAX_BIASED = 4096
_MAX_METADATA = 64

StopText = Annotated[str, Field(min_length=1, max_length=512)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES), Whole]
Biases = Annotated[
    dict[TokenKey, Bias],
    Field(max_length=_MAX_BIASED, json_schema_extra={"additionalProperties": False}),
    few_entries(_MAX_BIASED),
]
Metadata = Annotated[
    dict[Label, Label], Field(max_length=_MAX_METADATA), few_entries(_MAX_METADATA)
]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Only(False)] = None


def _needs_stream(value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
    if value is not None and not info.data.get("stream"):
        raise PydanticCustomError("needs_stream", "it is for streams alone: set stream, too")
    return value


IfStreamed = Annotated[StreamOptions | None, AfterValidator(_needs_stream)]
"""Field that requires `stream`, which must be declared before it."""


class Sampled(Body):
    """Fields of chats and completions; OpenAI lacks the fields `top_k`, `min_p`,
    `repetition_penalty` and `ignore_eos`."""

    model: ModelName = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = Field(default=None, description="0 or -1: any token")
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: Seed | None = None
    n: Choices | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: IfStreamed = None

    user: Label | None = None

    def sampling(self, vocab_size: int, defaults: Sampling) -> Sampling:
        """Sampling parameters of the request, with `defaults` for absent fields.

        Raises `Problem` for a bias of tokens that the model does not have.
        """
        bias = {int(key): value for key, value in (self.logit_bias or {}).items()}
        if bias and max(bias) >= vocab_size:
            raise Problem(
                400,
                f"logit_bias: the model has no token {max(bias)}, its last is {vocab_size - 1}",
                code="invalid_value",
                param="logit_bias",
            )
        return Sampling(
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=max(_or(self.top_k, defaults.top_k), 0),
            min_p=_or(self.min_p, defaults.min_p),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=bias,
            seed=self.seed,
        )

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its token usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True


def room_for(
    prompt_tokens: int,
    asked: int | None,
    *,
    context_length: int,
    cap: int | None,
    default: int | None,
    param: str,
) -> int:
    """Limit on new tokens: `asked`, or else the rest of the context, at most `default`.

    `cap` limits both; the answer then ends with the reason "length". Raises `Problem`, about field
    `param`, if prompt and answer do not fit into the context.
    """
    left = context_length - prompt_tokens
    if left < (1 if asked is None else asked):
        wanted = f"{prompt_tokens} in the prompt"
        if asked is not None:
            wanted = f"{prompt_tokens + asked} tokens ({wanted}, {asked} in the answer)"
        raise Problem(
            400,
            f"This model's maximum context length is {context_length} tokens, and the request "
            f"has {wanted}. Shorten the prompt or the answer.",
            code="context_length_exceeded",
            param=param,
        )
    wanted_tokens = min(left, default or left) if asked is None else asked
    return min(wanted_tokens, cap or wanted_tokens)


def shared(default: int, answers: int) -> int:
    """Default of new tokens for each answer of a request that sets no limit.

    Nodes reserve cache for all answers in advance, so that more than `FEW_CHOICES` answers share
    the total of `FEW_CHOICES` defaults.
    """
    return max(min(default, default * FEW_CHOICES // answers), 1)


def same(first: int | None, second: int | None, names: Sequence[str]) -> int | None:
    """Value of a field with two names. Raises `Problem` if they differ."""
    if first is not None and second is not None and first != second:
        raise Problem(
            400,
            f"{names[0]} and {names[1]} differ: give one of them",
            code="invalid_value",
            param=names[1],
        )
    return second if first is None else first


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
