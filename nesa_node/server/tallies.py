"""Counters of what the device computed since the daemon began, over all spans."""

from __future__ import annotations

from collections.abc import Iterable

from nesa_node.core import metric_names as names
from nesa_node.server.batch import Share
from nesa_node.server.lane import DECODE_TOKENS
from nesa_node.swarm.messages import Step


class Tallies:
    """Computation counters. The scheduler adds each iteration after its outputs are delivered."""

    def __init__(self) -> None:
        self.steps = 0
        self.failed = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.batch = names.BATCH.tally()
        self.iteration_s = names.ITERATION.tally()
        self.step_s = names.NODE_STEP.tally()

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def ran(self, shares: Iterable[Share], seconds: float, now: float) -> None:
        """Count an iteration of `seconds` that ended at `now` on the clock of `Pending.arrived`."""
        sessions = 0
        for share in shares:
            sessions += 1
            if share.error is not None:
                self.failed += 1
                continue
            for piece in share.pieces:
                if _decodes(piece.feed.step):
                    self.decode_tokens += piece.end - piece.start
                else:
                    self.prefill_tokens += piece.end - piece.start
            for pending in share.done:
                self.step_s.add(now - pending.arrived)
            self.steps += len(share.done)
        if sessions:
            self.batch.add(sessions)
            self.iteration_s.add(seconds)


def _decodes(step: Step) -> bool:
    # A loop, since `all` takes three times as long.
    for part in step.rows:  # noqa: SIM110
        if part.count > DECODE_TOKENS:
            return False
    return True
