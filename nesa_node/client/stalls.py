"""Detection of stalled links between two nodes that both answer the client.

Pure. Judges by the nodes' pongs: one node has begun to push a step, and the next node has not
received it, is idle, and receives no bytes. `docs/decisions/023` gives the reasons.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nesa_node.swarm.messages import Pong


@dataclass(frozen=True, slots=True)
class Report:
    """A node's answer to a probe that was sent at `asked_at`."""

    pong: Pong
    asked_at: float


class Stalls:
    """Stall detector for one session's chain. Times are those of its `Suspicion`."""

    def __init__(self) -> None:
        self._since: dict[Hashable, tuple[int, float]] = {}
        """By the receiving node: bytes received, and when that number was first seen."""

    def clear(self) -> None:
        """Start over after an output or a change of the chain."""
        self._since.clear()

    def look(
        self, chain: Sequence[tuple[Hashable, Report | None]], epoch: int, now: float
    ) -> tuple[int, float] | None:
        """Find the first stalled link: the receiving node's index, and the stall's least duration
        in seconds.

        None if no link is stalled. `chain` has the nodes in order, each with its last report.
        """
        found: tuple[int, float] | None = None
        for place, ((_, before), (name, report)) in enumerate(pairwise(chain), 1):
            came = _came_of_what_was_pushed(before, report, epoch)
            if came is None or report is None:
                self._since.pop(name, None)
                continue
            known, since = self._since.get(name, (-1, now))
            if came != known:
                since = now
            self._since[name] = came, since
            # Earlier probes may describe the time before the step was pushed.
            stalled_s = report.asked_at - since
            if stalled_s > 0 and found is None:
                found = place, stalled_s
        return found


def _came_of_what_was_pushed(
    before: Report | None, report: Report | None, epoch: int
) -> int | None:
    """Bytes received by a node that waits for a step which the node before has begun to push.

    None if that is not so, or if either node does not report it.
    """
    if before is None or report is None:
        return None
    sender, receiver = before.pong, report.pong
    if sender.epoch != epoch or receiver.epoch != epoch or receiver.busy:
        return None
    if sender.pushed is None or receiver.upstream_bytes is None:
        return None
    return receiver.upstream_bytes if sender.pushed > receiver.step else None
