"""What each machine of a pool was told to hold, and what of that can be counted on."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence

from nesa_node.core.ids import PeerId
from nesa_node.routing.placement.building import ModelShape
from nesa_node.server.pool.models import PLANNED_CACHE_TOKENS
from nesa_node.server.pool.pool_round import PoolRound
from nesa_node.swarm.dht.pool_notices import AssignedSpan, HeldModel

AVOID_S = 600.0
"""Time for which a machine that refused a model, or failed to hold it, is not asked again."""
UNSEEN_S = 60.0
"""Time for which a machine is believed to serve a model before its node is seen."""
START_TIMEOUT_S = 180.0
"""Time that an assigned machine has to show the model in its offer, before it counts as lost."""
RENEW_S = 600.0
"""Age at which an unchanged assignment is published again."""


class Assignments:
    """Assignments of one orchestrator; a successor takes over what offers show."""

    def __init__(self) -> None:
        self._published: dict[PeerId, tuple[tuple[AssignedSpan, ...], float]] = {}
        self._assigned_at: dict[tuple[PeerId, str], float] = {}
        self._avoided: dict[tuple[PeerId, str], tuple[float, str]] = {}
        """Until when a machine is not asked for a model again, and why. Its offer says that only
        until it is no longer told to hold the model."""
        self._claimed_at: dict[tuple[PeerId, str], float] = {}
        """Since when a machine has claimed to serve a model without a node that is seen to."""

    def keep(self, peers: Collection[PeerId]) -> None:
        """Forget what other machines were told."""
        self._published = {peer: each for peer, each in self._published.items() if peer in peers}

    def is_avoided(self, peer: PeerId, name: str) -> bool:
        return time.monotonic() < self._avoided.get((peer, name), (0.0, ""))[0]

    def refusals(self, name: str, peers: Collection[PeerId]) -> list[str]:
        """Reasons that these machines gave for not holding a model, while they are avoided."""
        return sorted(
            {
                reason
                for (peer, model), (_, reason) in self._avoided.items()
                if model == name and reason and peer in peers and self.is_avoided(peer, name)
            }
        )

    def record_assigned(self, peer: PeerId, name: str) -> None:
        self._assigned_at[peer, name] = time.monotonic()

    def present(
        self, round_: PoolRound, peer: PeerId, shapes: Mapping[str, ModelShape]
    ) -> dict[str, AssignedSpan]:
        """What a machine was told to hold, or holds by its offer if that was a predecessor's word.

        A machine that refused, failed, or never began is not counted on.
        """
        offer = round_.offers[peer]
        held = {each.model: each for each in offer.held}
        lost = {
            each.model: each.reason
            for each in offer.held
            if each.state in ("refused", "failed") or self._is_unseen(round_, peer, each)
        }
        until = time.monotonic() + AVOID_S
        self._avoided |= {(peer, name): (until, reason) for name, reason in lost.items()}
        if peer not in self._published:
            spans = tuple(
                _as_assigned(each, shapes)
                for each in offer.held
                if each.state in ("loading", "serving") and each.model not in lost
            )
            self._published[peer] = spans, -math.inf
            return {span.model: span for span in spans}
        present = {}
        for span in self._published[peer][0]:
            shown = held.get(span.model)
            age_s = time.monotonic() - self._assigned_at.get((peer, span.model), -math.inf)
            if span.model in lost:
                continue
            if shown is None and age_s < START_TIMEOUT_S:
                present[span.model] = span
            elif shown is not None and shown.takes_memory:
                # The swarm's own orchestrator may have moved it.
                present[span.model] = span.model_copy(update={"span": shown.span})
        return present

    def is_due(self, peer: PeerId, spans: Sequence[AssignedSpan]) -> bool:
        """Whether a machine has to be told, or told again, to hold `spans`."""
        before, at = self._published[peer]
        is_old = time.monotonic() - at >= RENEW_S
        return _parts(before) != _parts(spans) or (is_old and bool(spans))

    def record_published(self, peer: PeerId, spans: Sequence[AssignedSpan]) -> None:
        self._published[peer] = tuple(spans), time.monotonic()

    def _is_unseen(self, round_: PoolRound, peer: PeerId, held: HeldModel) -> bool:
        """Whether a machine has claimed for long to serve a model, and no node is seen to."""
        claim, now = (peer, held.model), time.monotonic()
        if (
            held.state != "serving"
            or held.model not in round_.snapshots
            or peer in round_.serving_nodes(held.model)
        ):
            self._claimed_at.pop(claim, None)
            return False
        return now - self._claimed_at.setdefault(claim, now) > UNSEEN_S


def _as_assigned(held: HeldModel, shapes: Mapping[str, ModelShape]) -> AssignedSpan:
    shape = shapes.get(held.model)
    tokens = PLANNED_CACHE_TOKENS if shape is None else shape.cache_tokens
    return AssignedSpan(
        model=held.model, span=held.span, quant_type=held.quant_type, cache_tokens=tokens
    )


def _parts(spans: Sequence[AssignedSpan]) -> frozenset[tuple[str, str]]:
    """What makes an assignment another one: a moved span does not."""
    return frozenset((each.model, each.quant_type) for each in spans)
