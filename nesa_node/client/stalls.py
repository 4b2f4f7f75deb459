"""Which link between two nodes of a chain carries nothing, although both answer the client.

Pure. By what the nodes say in their pongs: one has begun to push a step, the next one has not got
it, does nothing else, and no byte of it comes. `docs/decisions/023` says why.
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
    """Of one session's chain. Times are those of its `Suspicion`."""

    def __init__(self) -> None:
        self._since: dict[Hashable, tuple[int, float]] = {}
        """By the node after a link: what had come to it, and when that was known."""

    def clear(self) -> None:
        """An output has come, or the chain has changed."""
        self._since.clear()

    def look(
        self, chain: Sequence[tuple[Hashable, Report | None]], epoch: int, now: float
    ) -> tuple[int, float] | None:
        """The first node to which nothing comes, as its place, and for how long at least.

        None without a stall. `chain` has the nodes in order, each with its last report.
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
            # Whatever was asked before that may say how it was before the step was pushed.
            stalled_s = report.asked_at - since
            if stalled_s > 0 and found is None:
                found = place, stalled_s
        return found


def _came_of_what_was_pushed(
    before: Report | None, report: Report | None, epoch: int
) -> int | None:
    """Bytes that have come to a node that waits for a step of the one before; else None.

    Nodes that do not tell are not judged.
    """
    if before is None or report is None:
        return None
    sender, receiver = before.pong, report.pong
    if sender.epoch != epoch or receiver.epoch != epoch or receiver.busy:
        return None
    if sender.pushed is None or receiver.upstream_bytes is None:
        return None
    return receiver.upstream_bytes if sender.pushed > receiver.step else None
