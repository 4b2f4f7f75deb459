"""What happens to a swarm under churn, and how long its sessions wait for it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from nesa_node.core.ids import Span

Kind = Literal["kill", "drain", "add"]
KINDS: tuple[Kind, ...] = ("kill", "drain", "add")


@dataclass(frozen=True, slots=True)
class Event:
    kind: Kind
    span: Span
    peer_id: str | None
    """The node that is hit; None where one is added."""


def choose_event(
    rng: random.Random, serving: Mapping[Span, Sequence[str]], *, most_nodes: int
) -> Event:
    """A kind of event that is possible, then whom it hits.

    No span loses its last node, and with `most_nodes` none is added. Raises `ValueError` where
    nothing is possible.
    """
    can_lose = [(span, peer) for span, peers in serving.items() if len(peers) > 1 for peer in peers]
    can_add = sum(map(len, serving.values())) < most_nodes
    kinds = [kind for kind in KINDS if (can_add if kind == "add" else can_lose)]
    if not kinds:
        raise ValueError("every span has a single node, and no more may be added")
    kind = rng.choice(kinds)
    if kind == "add":
        return Event(kind, rng.choice(list(serving)), None)
    return Event(kind, *rng.choice(can_lose))


def longest_wait(times: Sequence[float], since: float, until: float) -> float | None:
    """The longest wait between two tokens that overlaps `since` to `until`; None if none does."""
    waits = [(before, after) for before, after in pairwise(times) if after > since]
    return max((after - before for before, after in waits if before < until), default=None)
