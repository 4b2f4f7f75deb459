"""Replacements of nodes in a running session."""

from __future__ import annotations

from dataclasses import dataclass

from nesa_node.core.ids import PeerId

MOST_KEPT = 20
"""Most records kept of one session, the newest."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Replacement of the nodes `lost`, complete at `at` (Unix time) after `took_ms`."""

    at: float
    lost: tuple[PeerId, ...]
    took_ms: float
