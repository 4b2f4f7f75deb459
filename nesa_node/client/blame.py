"""Whom to replace when a step does not come back.

In a chain a client sees only the ends of what two neighbours did with each other: either may have
lost the step, and either may lie. So the one further down is replaced first, and if the same node
has trouble with its next neighbour too, that node as well. Whoever was replaced is avoided for a
while, not for ever: it may have been the honest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from nesa_node.client.hop import HopLink
from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.messages import Pong
from nesa_node.swarm.notices import FailureKind


class Blame:
    """Counts, until `step_done`, how often a node could not get on with the one after it."""

    def __init__(self) -> None:
        self._quarrels: Counter[PeerId] = Counter()

    def step_done(self) -> None:
        self._quarrels.clear()

    def one_of_both(
        self,
        upstream: HopLink,
        downstream: HopLink | None,
        what: str,
        fault: FailureKind = "lost",
    ) -> str:
        """Mark one or both as lost, and return why. `downstream` is None after the last node."""
        peer = upstream.hop.peer_id
        self._quarrels[peer] += 1
        if downstream is None or self._quarrels[peer] > 1:
            upstream.lose(f"{peer}: {what}", fault)
        if downstream is not None:
            downstream.lose(f"{peer} reached {downstream.hop.peer_id} in vain: {what}", fault)
        return what

    def cut_off(
        self,
        upstream: HopLink,
        downstream: HopLink,
        what: str,
        replaceable: Collection[PeerId],
    ) -> None:
        """Nothing comes from one to the other: mark as lost what the chain can do without.

        `replaceable` has at least one of both.
        """
        if downstream.hop.peer_id in replaceable:
            self.one_of_both(upstream, downstream, what, "stalled")
        else:
            upstream.lose(what, "stalled")

    def overdue(
        self, links: Sequence[HopLink], pongs: Sequence[Pong | BaseException], step: int
    ) -> str:
        """Mark as lost who keeps `step` from going on, and return why.

        `links` are those that the step goes through, in order, with their answers to a ping.
        """
        applied: HopLink | None = None
        for link, pong in zip(links, pongs, strict=True):
            if isinstance(pong, BaseException):
                link.lose(str(pong))
                return str(pong)
            if pong.step < step:
                what = "the step never reached it"
                if applied is not None:
                    return self.one_of_both(applied, link, what)
                link.lose(what)
                return what
            applied = link
        what = "no output although it applied the step"
        links[-1].lose(what)
        return what


def busy(links: Sequence[HopLink], pongs: Sequence[Pong | BaseException]) -> HopLink | None:
    """The first that says it is still at it. Raises what a ping raised before that one."""
    for link, pong in zip(links, pongs, strict=True):
        if isinstance(pong, PeerUnreachableError):
            return None
        if isinstance(pong, Pong) and pong.busy:
            return link
    return None
