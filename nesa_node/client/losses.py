"""What a session has lived through: nodes that left its chain while it ran."""

from __future__ import annotations

from dataclasses import dataclass

from nesa_node.core.ids import PeerId

MOST_KEPT = 20
"""Of one session, the last ones."""


@dataclass(frozen=True, slots=True)
class Loss:
    """`lost` failed or left, others stood in for them `took_ms` later: at `at`, in Unix time."""

    at: float
    lost: tuple[PeerId, ...]
    took_ms: float
