"""Generation job: its parameters, and the events that it yields.

V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, with OpenAI's defaults; `temperature=0` is greedy.

    Applied in this order: penalties and `logit_bias`, temperature, top-k, top-p, min-p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt and answer, as in transformers."""
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens in the answer, as OpenAI defines it."""
    frequency_penalty: float = 0.0
    """Subtracted from logits once per occurrence in the answer, as OpenAI defines it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """Choice i of a job has its own random generator, seeded by `seed` and i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prompt to be continued `n` times; its creator has validated all values."""

    prompt: tuple[int, ...]
    max_tokens: int
    """Limit on new tokens per choice. 0: only log probabilities of the prompt."""
    n: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    """Texts that end a choice; they are not part of it."""
    ignore_eos: bool = False
    top_logprobs: int | None = None
    """None: no log probabilities. 0: of the chosen tokens; k: also of the k likeliest tokens."""
    prompt_logprobs: bool = False
    """Whether the prompt's tokens get log probabilities, too (`echo` with `logprobs`)."""
    prefix_scope: str = ""
    """Prefix-cache scope: jobs of one scope reuse each other's cached prefixes."""
    grammar: str | None = None
    """llguidance grammar that the answer must follow."""
    adapter: str | None = None
    """Published adapter that nodes use beside the model."""


@dataclass(frozen=True, slots=True)
class CandidateToken:
    """Token with its bytes and its log probability before temperature and truncation."""

    token_id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class SequenceToken(CandidateToken):
    """Token of the prompt or the answer; `top` are the likeliest at its position, best first."""

    top: tuple[CandidateToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Progress of one choice; `text` never ends within a character or a possible stop text.

    `tokens` are all tokens generated since the last delta, even if their text is held back, with
    log probabilities if the job asks for them (else 0.0 and no bytes).
    """

    index: int
    text: str = ""
    tokens: tuple[SequenceToken, ...] = ()
    finish_reason: FinishReason | None = None
    """Set in a choice's last delta only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """First event: prefill has ended; nodes had `cached_tokens` of the prompt in their cache."""

    cached_tokens: int = 0
    tokens: tuple[SequenceToken, ...] = ()
    """The prompt's tokens with `prompt_logprobs`, else empty; the first log probability is 0.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """Last event: the session is closed. It had `hops`, of which `drawn` were drawn for audits."""

    hops: int
    drawn: int


GenerationEvent = PrefillDone | Delta | SessionEnd
