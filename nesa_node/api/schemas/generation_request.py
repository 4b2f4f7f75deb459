"""Fields shared by chats and completions, defaults of a model, and the body of completions."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from nesa_node.api.generation.job import SamplingParams
from nesa_node.api.generation.tokenization import offload_if_large
from nesa_node.api.schemas.request_body import (
    AcceptedValues,
    CountOrZero,
    FloatToInt,
    Label,
    LogitBias,
    ModelName,
    OnlyNull,
    PresencePenalty,
    Probability,
    RepetitionPenalty,
    RequestBody,
    Seed,
    Temperature,
    Text,
    TokenId,
    TokenKey,
    TopK,
    TopLogprobs,
    limit_entries,
)
from nesa_node.core.logging import get_logger
from nesa_node.web.problem import invalid_request

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from nesa_node.core.settings.models import GatewayConfig

log = get_logger(__name__)


MAX_CHOICES = 128
MAX_CHOICES_AT_FULL_DEFAULT = 4
MAX_STOP_TEXTS = 16
"""Limit on stop texts: OpenAI allows 4, code editors send up to 14."""
_MAX_BIASED_TOKENS = 4096
_MAX_METADATA_ENTRIES = 64

StopText = Annotated[str, Field(min_length=1, max_length=512)]
ChoiceCount = Annotated[int, Field(ge=1, le=MAX_CHOICES), FloatToInt]
LogitBiases = Annotated[
    dict[TokenKey, LogitBias],
    Field(max_length=_MAX_BIASED_TOKENS, json_schema_extra={"additionalProperties": False}),
    limit_entries(_MAX_BIASED_TOKENS),
]
Metadata = Annotated[
    dict[Label, Label],
    Field(max_length=_MAX_METADATA_ENTRIES),
    limit_entries(_MAX_METADATA_ENTRIES),
]


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, AcceptedValues(False)] = None


def _needs_stream(value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
    if value is not None and not info.data.get("stream"):
        raise PydanticCustomError("needs_stream", "it is for streams alone: set stream, too")
    return value


OnlyWithStream = Annotated[StreamOptions | None, AfterValidator(_needs_stream)]
"""Field that requires `stream`, which must be declared before it."""


class ConversationFields(RequestBody):
    """OpenAI's fields of chats and responses that have no effect here, or must have none."""

    metadata: Metadata | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Annotated[Any, AcceptedValues("auto", "default")] = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_options: OnlyNull = None
    prompt_cache_retention: Annotated[Any, AcceptedValues("in_memory", "in-memory", "24h")] = None
    moderation: OnlyNull = None


class SamplingRequest(RequestBody):
    """Fields of chats and completions, with vLLM's, which OpenAI's API lacks."""

    model: ModelName = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = Field(default=None, description="0 or -1: any token")
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: PresencePenalty | None = None
    logit_bias: LogitBiases | None = None
    seed: Seed | None = None
    n: ChoiceCount | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_TEXTS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: OnlyWithStream = None

    user: Label | None = None

    def sampling(self, vocab_size: int, defaults: SamplingParams) -> SamplingParams:
        """Sampling parameters of the request, with `defaults` for absent fields.

        Raises `HttpProblem` for a bias of tokens that the model does not have.
        """
        bias = {int(key): value for key, value in (self.logit_bias or {}).items()}
        if bias and max(bias) >= vocab_size:
            raise invalid_request(
                f"logit_bias: the model has no token {max(bias)}, its last is {vocab_size - 1}",
                param="logit_bias",
            )
        return replace(
            override_sampling(defaults, self),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=bias,
            seed=self.seed,
        )

    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its token usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True


def resolve_max_tokens(
    prompt: Sequence[int],
    requested: int | None,
    context_length: int,
    config: GatewayConfig,
    *,
    choices: int = 1,
    param: str,
) -> int:
    """Limit on new tokens of each of `choices` answers: `requested`, or a default that fits.

    The gateway's limit `max_new_tokens` holds for both; the answer then ends with the reason
    "length". Nodes reserve cache for all answers in advance, so that more than
    `MAX_CHOICES_AT_FULL_DEFAULT` answers share the total of that many defaults. Raises
    `HttpProblem`, about field `param`, if prompt and answer do not fit into the context.
    """
    prompt_tokens = len(prompt)
    left = context_length - prompt_tokens
    if left < (1 if requested is None else requested):
        wanted = f"{prompt_tokens} in the prompt"
        if requested is not None:
            wanted = f"{prompt_tokens + requested} tokens ({wanted}, {requested} in the answer)"
        raise invalid_request(
            f"This model's maximum context length is {context_length} tokens, and the request "
            f"has {wanted}. Shorten the prompt or the answer.",
            param=param,
            code="context_length_exceeded",
        )
    if requested is None:
        shared = config.default_new_tokens * MAX_CHOICES_AT_FULL_DEFAULT // choices
        requested = min(left, max(min(config.default_new_tokens, shared), 1))
    return min(requested, config.max_new_tokens or requested)


_FIELD_TYPES: dict[str, TypeAdapter[Any]] = {
    "temperature": TypeAdapter(Temperature),
    "top_p": TypeAdapter(Probability),
    "top_k": TypeAdapter(TopK),
    "min_p": TypeAdapter(Probability),
    "repetition_penalty": TypeAdapter(RepetitionPenalty),
}


def override_sampling(defaults: SamplingParams, body: RequestBody) -> SamplingParams:
    """`defaults` with the sampling parameters that `body` sets."""
    fields = {name: getattr(body, name, None) for name in _FIELD_TYPES}
    given = {name: value for name, value in fields.items() if value is not None}
    top_k = max(given.pop("top_k", defaults.top_k), 0)
    return replace(defaults, **given, top_k=top_k)


def read_default_sampling(config: GenerationConfig) -> SamplingParams:
    """Sampling parameters that `config` sets, and OpenAI's defaults for the rest.

    `do_sample` is ignored: requests get greedy decoding by temperature 0. Values that a request may
    not have are ignored and logged, since these files are not trusted.
    """
    advice: dict[str, Any] = {}
    for name, kind in _FIELD_TYPES.items():
        value = getattr(config, name, None)
        if value is None:
            continue
        try:
            advice[name] = kind.validate_python(value, strict=True)
        except ValidationError:
            log.warning("default_sampling_field_ignored", field=name, value=repr(value)[:100])
    advice["top_k"] = max(advice.get("top_k", 0), 0)
    return SamplingParams(**advice)


def describe_sampling(defaults: SamplingParams) -> dict[str, float]:
    """Default sampling parameters by name, for `/v1/models` and the log."""
    return {name: getattr(defaults, name) for name in _FIELD_TYPES}


ANY_OBJECT: dict[str, Any] = {"type": "object"}

GrammarCheck = Callable[[str], Awaitable[None]]
"""Check of a grammar. Raises `ValueError` if it cannot be followed."""


class PlainText(RequestBody):
    type: Literal["text"]


class JsonObject(RequestBody):
    type: Literal["json_object"]


class NamedSchema(RequestBody):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    # A field named `schema` would hide pydantic's method.
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchema(RequestBody):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


def requested_schema(
    response_format: PlainText | JsonObject | JsonSchema | None,
) -> dict[str, Any] | None:
    """JSON schema that the answer must follow; None: any text."""
    match response_format:
        case JsonObject():
            return ANY_OBJECT
        case JsonSchema():
            schema = response_format.json_schema.schema_
            return ANY_OBJECT if schema is None else schema
    return None


async def checked_grammar(
    schema: dict[str, Any] | None, param: str, check: GrammarCheck
) -> str | None:
    """Checked grammar of a JSON schema; `HttpProblem` for a schema that cannot be followed."""
    if schema is None:
        return None
    from nesa_node.api.generation.grammar import json_schema_grammar

    try:
        grammar = await offload_if_large(math.inf, lambda: json_schema_grammar(schema))
    except ValueError as error:
        raise invalid_request(f"{param}: {str(error)[:1000]}", param=param) from None
    await check_grammar(grammar, param, check)
    return grammar


async def check_grammar(grammar: str, param: str, check: GrammarCheck) -> None:
    """Raise `HttpProblem` if `check` refuses a grammar made of JSON schemas in field `param`."""
    try:
        await check(grammar)
    except ValueError as error:
        reason = f"the JSON schema cannot be followed: {error}"
        raise invalid_request(f"{param}: {reason[:1000]}", param=param) from None


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
            raise invalid_request(
                "best_of: every answer that is generated is returned; give n alone",
                param="best_of",
                code="unsupported_parameter",
            )
        if self.max_tokens == 0 and not self.echo:
            raise invalid_request(
                "max_tokens: 0 asks for nothing unless echo is set", param="max_tokens"
            )
        if n * len(self.prompts()) > MAX_CHOICES:
            raise invalid_request(
                f"n: at most {MAX_CHOICES} answers at once, over all prompts", param="n"
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
