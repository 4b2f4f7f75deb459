"""Attribution of faults: which hop is replaced when a step does not come back.

The client sees only the two ends of an exchange between neighbours in a chain: either may have lost
the step, and either may lie. The downstream hop is replaced first. If the same upstream hop fails
with its next neighbour as well, it is replaced too. A replaced node is avoided for a while only,
since it may have been the honest one.
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
    """Counter of failures between neighbours since the last completed step."""

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
        """Fail the downstream hop, or both on a repeated failure; return `what`.

        `downstream` is None after the last node: then `upstream` fails.
        """
        peer = upstream.hop.peer_id
        self._quarrels[peer] += 1
        if downstream is None or self._quarrels[peer] > 1:
            upstream.lose(f"{peer}: {what}", fault)
        if downstream is not None:
            downstream.lose(f"{peer} did not reach {downstream.hop.peer_id}: {what}", fault)
        return what

    def cut_off(
        self,
        upstream: HopLink,
        downstream: HopLink,
        what: str,
        replaceable: Collection[PeerId],
    ) -> None:
        """Fail the hop of a stalled link that the chain can do without, downstream first.

        `replaceable` contains at least one of both.
        """
        if downstream.hop.peer_id in replaceable:
            self.one_of_both(upstream, downstream, what, "stalled")
        else:
            upstream.lose(what, "stalled")

    def overdue(
        self, links: Sequence[HopLink], pongs: Sequence[Pong | BaseException], step: int
    ) -> str:
        """Fail the hop that holds up `step`, and return why.

        `links` are the hops that the step passes, in order, with their answers to a ping. A hop
        that did not answer its ping is lost. Otherwise the first hop that has not applied the step
        is blamed together with its predecessor (`one_of_both`); the last hop, if all have applied
        it.
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
    """The first hop that reports itself busy, or None. Hops after one that is unreachable do not
    count.
    """
    for link, pong in zip(links, pongs, strict=True):
        if isinstance(pong, PeerUnreachableError):
            return None
        if isinstance(pong, Pong) and pong.busy:
            return link
    return None
