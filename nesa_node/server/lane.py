"""State of one session in the scheduler: what waits to run, its outputs, and when its next decode
step is due.

T packed tokens, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.swarm.messages import Priority

PRIORITIES: tuple[Priority, ...] = ("interactive", "batch", "training")
"""Most urgent first; `Lane.priority` is an index into it."""
DECODE_TOKENS = 8
"""Most tokens per row in a decode step. More than one allows speculative tokens."""
MAX_DECODE_TOKENS = 64
"""Most tokens in a decode step, all rows together; it runs in one iteration. Steps with more are
cut into chunks, as prefills are. Beams and parallel samples have one token for each row."""
LIVE_S = 1.0
"""Seconds after its last decode step during which a session counts as decoding."""
LATE = 1.25
"""A session that is away for more than this multiple of its usual gap is not waited for."""
LEARNING_RATE = 0.25
CALM_RATES = (0.5, 0.02)
"""Learning rates of `calm_s` for a shorter gap and for a longer one: it follows shorter gaps at
once, longer ones slowly."""


def is_decode(counts: Sequence[int]) -> bool:
    """Whether a step with these tokens per row is a decode step."""
    return max(counts) <= DECODE_TOKENS and sum(counts) <= MAX_DECODE_TOKENS


@dataclass(eq=False, kw_only=True)
class Lane:
    """What the batch policy knows about one session."""

    client: PeerId
    priority: int
    """Index into `PRIORITIES`."""
    span: Span
    """Only sessions through the same blocks run in one batch."""
    leads: bool = False
    """Whether the session enters the chain at this node."""
    tokens: int = 0
    """Tokens that wait to be run."""
    decoding: bool = False
    """Whether exactly one decode step waits, and nothing else."""
    since: float = 0.0
    """Arrival time of the oldest waiting step."""
    prefilled: bool = False
    """Whether a prefill step ran since the last decode step: what waits is a later chunk of the
    same prompt."""
    held: bool = False
    """Whether the session must not be run now."""
    served_at: float = -math.inf
    decoded_at: float = -math.inf
    before_at: float = -math.inf
    """Time of the decode step before the last."""
    decode_tokens: int = 0
    """Tokens of the last decode step."""
    away_s: float | None = None
    """Mean time from a decode step to the arrival of the next."""
    calm_s: float | None = None
    """The same without contention: a prefill that delays the session at other nodes must not let
    prefills here take longer, or the delays would reinforce each other."""

    @property
    def waits(self) -> bool:
        return self.tokens > 0 and not self.held

    @property
    def due(self) -> float:
        """When the next decode step is expected."""
        return self.decoded_at + (self.away_s or 0.0)

    @property
    def soonest(self) -> float:
        """Earliest time at which the next decode step may arrive."""
        return self.decoded_at + (self.calm_s or 0.0)

    @property
    def late(self) -> float:
        """Time after which the next decode step is no longer waited for."""
        return self.decoded_at + LATE * (self.away_s or 0.0)

    @property
    def ran_at(self) -> tuple[float, ...]:
        """Times of the last two decode steps. Sessions with a time in common ran in one batch."""
        return tuple(filter(math.isfinite, (self.decoded_at, self.before_at)))

    def is_away(self, now: float) -> bool:
        """Whether its next decode step is expected and not overdue."""
        return not self.waits and self.late > now

    def lives(self, now: float) -> bool:
        """Whether a decode step waits, or is likely within `LIVE_S`."""
        return self.decoding if self.waits else now - self.decoded_at < LIVE_S

    def expect(self, away_s: float | None) -> None:
        """Set the gap to that of comparable sessions, if none was measured yet."""
        if self.away_s is None:
            self.away_s = self.calm_s = away_s

    def decodes(self, now: float) -> None:
        """Record that its decode step runs at `now`, and learn the gap before it."""
        away_s = self.since - self.decoded_at
        if away_s < LIVE_S:
            if self.away_s is None or self.calm_s is None:
                self.away_s = self.calm_s = away_s
            self.away_s += LEARNING_RATE * (away_s - self.away_s)
            self.calm_s += CALM_RATES[away_s > self.calm_s] * (away_s - self.calm_s)
        self.before_at, self.decoded_at, self.decode_tokens = self.decoded_at, now, self.tokens
        self.prefilled = False
