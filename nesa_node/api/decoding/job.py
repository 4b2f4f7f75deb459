"""What one request asks of a model, and what comes back while it is generated.

V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen; the defaults are OpenAI's, `temperature=0` is greedy.

    Applied in this order: penalties and `logit_bias`, temperature, top-k, top-p, min-p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: any."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """As transformers has it, over prompt and answer."""
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens that the answer holds, as OpenAI defines it."""
    frequency_penalty: float = 0.0
    """The same, times how often."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """Choice i of a job draws from a generator of its own, made of the seed and i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prompt to be continued `n` times. Whoever makes it has checked all values."""

    prompt: tuple[int, ...]
    max_tokens: int
    """New tokens per choice. 0: the prompt's own log probabilities only."""
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Texts that end a choice; they are not part of it."""
    ignore_eos: bool = False
    top_logprobs: int | None = None
    """None: no log probabilities. 0: those of the chosen tokens, k: also of the k likeliest."""
    prompt_logprobs: bool = False
    """Also those of the prompt's tokens (`echo` with `logprobs`)."""
    prefix_scope: str = ""
    """Jobs of the same scope begin with what nodes still hold of each other's prompts."""
    grammar: str | None = None
    """llguidance's grammar that the answer must follow."""


@dataclass(frozen=True, slots=True)
class TokenChance:
    """A token, its bytes and the log of its probability before temperature and truncation."""

    token_id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Chosen(TokenChance):
    """A token of the prompt or the answer; `top` has the likeliest in its place, best first."""

    top: tuple[TokenChance, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What came for one choice: `text` never ends within a character or what may become a stop.

    `tokens` are those generated since the last delta, with log probabilities if the job asks for
    them (else 0.0 and no data): all of them, also where their text is still held back.
    """

    index: int
    text: str = ""
    tokens: tuple[Chosen, ...] = ()
    finish_reason: FinishReason | None = None
    """Once, in a choice's last delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRead:
    """Comes first: the prompt has been computed. `cached_tokens` nodes still held."""

    cached_tokens: int = 0
    tokens: tuple[Chosen, ...] = ()
    """With `prompt_logprobs`; the first token's is 0.0."""


Event = PromptRead | Delta
