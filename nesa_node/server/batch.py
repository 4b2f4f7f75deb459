"""Batch of one iteration: tokens of several sessions' steps, packed for one forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec

from nesa_node.engine.blocks import Blocks, Run
from nesa_node.engine.feeds import Feed
from nesa_node.engine.pages import PageTable
from nesa_node.swarm.messages import Step

P = ParamSpec("P")


@dataclass(eq=False, slots=True, kw_only=True)
class Pending(Feed):
    """A queued step; `taken` of its packed tokens are already in iterations."""

    step: Step
    arrived: float
    taken: int = 0

    @property
    def left(self) -> int:
        return self.hidden.tokens - self.taken


@dataclass(slots=True)
class Piece:
    """The packed tokens `start:end` of one row of a step."""

    feed: Pending
    row: int
    start: int
    end: int


@dataclass(slots=True)
class Share:
    """One session's part of an iteration."""

    pieces: list[Piece]
    """Their tokens, chunk after chunk, are those of `runs`, run after run."""
    runs: list[Run]
    done: list[Pending]
    """Steps that this iteration completes."""
    error: Exception | None = field(default=None)
    """Why the part could not be run."""


def take(queue: Iterable[Pending], tables: Sequence[PageTable], tokens: int) -> Share:
    """Take the next `tokens` of consecutive queued steps into an iteration."""
    pieces: list[Piece] = []
    done: list[Pending] = []
    for pending in queue:
        count = min(tokens, pending.left)
        pieces += _pieces(pending, count)
        if not pending.left:
            done.append(pending)
        tokens -= count
        if not tokens:
            break
    if len(pieces) > 1:
        # The sort is stable: tokens of a row keep their order across steps.
        pieces.sort(key=lambda piece: piece.row)
    counts: dict[int, int] = {}
    for piece in pieces:
        counts[piece.row] = counts.get(piece.row, 0) + piece.end - piece.start
    runs = [Run(tables[row], count) for row, count in counts.items()]
    return Share(_joined(pieces), runs, done)


def run_shares(blocks: Blocks, shares: Sequence[Share]) -> float:
    """Run an iteration on the device's thread and return its duration in seconds.

    Sets `error` for sessions that get no pages. If the forward fails, each remaining session runs
    alone, and those that fail again get `error`.
    """
    started = time.perf_counter()
    for share in shares:
        share.error = _tried(_reserve, share)
    ready = [share for share in shares if share.error is None]
    if len(ready) == 1:
        ready[0].error = _tried(_forward, blocks, ready)
    elif ready and _tried(_forward, blocks, ready) is not None:
        for share in ready:
            share.error = _tried(_forward, blocks, [share])
    return time.perf_counter() - started


def _tried(do: Callable[P, None], *args: P.args, **options: P.kwargs) -> Exception | None:
    try:
        do(*args, **options)
    except Exception as error:
        return error
    return None


def _reserve(share: Share) -> None:
    """Reserve pages for the runs. May copy shared pages, which takes too long for the event loop.

    `sleep(0)` lets a thread that waits for the pool's lock take it between runs.
    """
    for number, run in enumerate(share.runs):
        if number:
            time.sleep(0)
        run.table.reserve(run.table.length + run.count)


def _forward(blocks: Blocks, shares: Sequence[Share]) -> None:
    pieces = [piece for share in shares for piece in share.pieces]
    blocks.run(pieces, [run for share in shares for run in share.runs])


def _pieces(pending: Pending, tokens: int) -> list[Piece]:
    pieces: list[Piece] = []
    start, end, at = pending.taken, pending.taken + tokens, 0
    for part in pending.step.rows:
        first, last = max(at, start), min(at + part.count, end)
        if first < last:
            pieces.append(Piece(pending, part.row, first, last))
        at += part.count
    pending.taken = end
    return pieces


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Merge adjacent chunks of the same step; most steps become one chunk."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.feed is piece.feed and last.end == piece.start:
            last.end = piece.end
        else:
            joined.append(piece)
    return joined
