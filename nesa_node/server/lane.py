"""A session as the policy sees it: what waits, and when more can be expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.swarm.messages import Priority

PRIORITIES: tuple[Priority, ...] = ("interactive", "batch", "training")
"""The most urgent first."""
DECODE_TOKENS = 8
"""A step of at most so many tokens for each row is one of a decode, speculation included."""
MAX_DECODE_TOKENS = 64
"""And of at most so many for all rows together: a step of a decode runs in one iteration. Steps of
more are cut into pieces, as prefills are. Beams and parallel samples have a token for each row."""
LIVE_S = 1.0
"""So long after its last step a session may be about to decode on."""
LATE = 1.25
"""Who is away for so many times as long as usual is not waited for."""
LEARNING_RATE = 0.25
CALM_RATES = (0.5, 0.02)
"""`calm_s` follows what is shorter at once, and what is longer slowly."""


def is_decode(counts: Sequence[int]) -> bool:
    """Whether a step of so many tokens for each row is one of a decode."""
    return max(counts) <= DECODE_TOKENS and sum(counts) <= MAX_DECODE_TOKENS


@dataclass(eq=False, kw_only=True)
class Lane:
    """What is to be known about a session."""

    client: PeerId
    priority: int
    """Its place in `PRIORITIES`."""
    span: Span
    """Only sessions through the same blocks run together."""
    leads: bool = False
    """It enters the chain here."""
    tokens: int = 0
    """Waiting to be run."""
    decoding: bool = False
    """All that waits is one step of a decode."""
    since: float = 0.0
    """When the first that waits came."""
    prefilled: bool = False
    """A step of a prefill was run since it decoded: what waits is a chunk of a longer one."""
    held: bool = False
    """It must not be run now."""
    served_at: float = -math.inf
    decoded_at: float = -math.inf
    before_at: float = -math.inf
    """When it decoded before that."""
    decode_tokens: int = 0
    """In its last step of a decode."""
    away_s: float | None = None
    """From one step of a decode to the arrival of the next, on average."""
    calm_s: float | None = None
    """The same where nothing else was in the way. Else a prefill that delays it at other nodes
    would let prefills here take longer, and so on in a circle."""

    @property
    def waits(self) -> bool:
        return self.tokens > 0 and not self.held

    @property
    def due(self) -> float:
        """When the next step of a decode can be expected."""
        return self.decoded_at + (self.away_s or 0.0)

    @property
    def soonest(self) -> float:
        """When it may come at the earliest."""
        return self.decoded_at + (self.calm_s or 0.0)

    @property
    def late(self) -> float:
        """From when on it is not waited for."""
        return self.decoded_at + LATE * (self.away_s or 0.0)

    @property
    def ran_at(self) -> tuple[float, ...]:
        """When it decoded lately: sessions with a time in common ran together."""
        return tuple(filter(math.isfinite, (self.decoded_at, self.before_at)))

    def is_away(self, now: float) -> bool:
        """Whether it is expected, and not too late yet."""
        return not self.waits and self.late > now

    def lives(self, now: float) -> bool:
        """Whether a step of a decode waits, or will before long."""
        return self.decoding if self.waits else now - self.decoded_at < LIVE_S

    def expect(self, away_s: float | None) -> None:
        """Take it to be away for so long, as others are, if nothing is known of it."""
        if self.away_s is None:
            self.away_s = self.calm_s = away_s

    def decodes(self, now: float) -> None:
        """Note that its step of a decode is run now."""
        away_s = self.since - self.decoded_at
        if away_s < LIVE_S:
            if self.away_s is None or self.calm_s is None:
                self.away_s = self.calm_s = away_s
            self.away_s += LEARNING_RATE * (away_s - self.away_s)
            self.calm_s += CALM_RATES[away_s > self.calm_s] * (away_s - self.calm_s)
        self.before_at, self.decoded_at, self.decode_tokens = self.decoded_at, now, self.tokens
        self.prefilled = False
