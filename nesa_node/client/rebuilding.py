"""Rebuilding of a session's chain, with retries until it succeeds or time runs out."""

from __future__ import annotations

import random
from collections.abc import Sequence

from nesa_node.client.hop import OPEN_TIMEOUT_S
from nesa_node.client.line import Line
from nesa_node.client.lookup import MOST_TOLD
from nesa_node.client.patience import Patience
from nesa_node.client.replay import Replay
from nesa_node.client.request import RouteRequest
from nesa_node.client.route import Route
from nesa_node.core.errors import (
    BusyError,
    MissingBlocksError,
    NesaError,
    PeerUnreachableError,
    RefusedError,
    RemoteError,
)
from nesa_node.core.span import Span
from nesa_node.core.waiting import Waiting, waiting
from nesa_node.routing.chains import Hop
from nesa_node.routing.repair import gaps

MEND_TIMEOUT_S = 3.0
"""First timeout of dialling and of opening a replacement, which may be unreachable without an
error."""
UNTIL_THERE_IS_ROOM: tuple[type[NesaError], ...] = (
    BusyError,
    MissingBlocksError,
    PeerUnreachableError,
    RemoteError,
)
_SHORTEST_OPEN_S = 1.0


class Rebuilding:
    """Rebuilds the route of one session."""

    def __init__(
        self,
        route: Route,
        request: RouteRequest,
        replay: Replay,
        line: Line,
        *,
        recovery_timeout_s: float,
        queue_timeout_s: float,
        rng: random.Random,
    ) -> None:
        self._route = route
        self._request = request
        self._replay = replay
        self._line = line
        self._recovery_timeout_s = recovery_timeout_s
        self._queue_timeout_s = queue_timeout_s
        self._rng = rng

    def patience(self) -> Patience:
        """New policy with time limits that start now."""
        return Patience(
            queue_timeout_s=self._queue_timeout_s,
            recovery_timeout_s=self._recovery_timeout_s,
            rng=self._rng,
        )

    async def persist(
        self,
        patience: Patience,
        passing: tuple[type[NesaError], ...],
        lengths: Sequence[int],
        *,
        begins: bool = False,
    ) -> None:
        """Rebuild until it succeeds, through errors of the types `passing`, as long as `patience`
        allows.

        With `begins`, missing blocks are waited for only where a node is joining with them. Raises
        the last error, as `MissingBlocksError` or `BusyError` with the time waited.
        """
        what = "a chain of nodes" if begins else "a chain of nodes without those that failed"
        limit_s = patience.recovery_left_s
        with waiting(what, blocks=(self._request.span,), limit_s=limit_s) as wait:
            attempts = 0
            while True:
                known = self._route.nodes.suspected
                longest_s = OPEN_TIMEOUT_S if begins or attempts else MEND_TIMEOUT_S
                timeout_s = min(max(patience.recovery_left_s, _SHORTEST_OPEN_S), longest_s)
                attempts += 1
                try:
                    return await self._replay.rebuild(
                        lengths, begins=begins, open_timeout_s=timeout_s
                    )
                except passing as error:
                    # Another peer has failed or is busy: the next attempt uses different nodes.
                    others_left = not self._route.nodes.suspected <= known
                    hopeless = begins and self._is_hopeless(error)
                    pause_s = patience.pause_s(error, others_left=others_left, hopeless=hopeless)
                    if pause_s is None:
                        if isinstance(error, RemoteError | RefusedError):
                            raise
                        raise self._give_up(error, hopeless=hopeless) from error
                    self._tell_wait(wait, error, patience)
                if patience.must_let_go:
                    await self._route.let_go()
                if pause_s:
                    await self._line.pause(pause_s)

    def _is_hopeless(self, error: Exception) -> bool:
        """Whether blocks are missing that no joining node is going to serve."""
        if not isinstance(error, MissingBlocksError):
            return False
        joining = [Hop(node.peer_id, node.span) for node in self._route.nodes.joining]
        return any(gaps(Span(start, end), joining) for start, end in error.missing)

    def _tell_wait(self, wait: Waiting, error: Exception, patience: Patience) -> None:
        nodes, busy = self._route.nodes, self._route.opener.refused_by
        left_s = patience.recovery_left_s
        if isinstance(error, BusyError) and busy is not None:
            wait.change(
                "room", blocks=(busy.span,), peers=(busy.peer_id,), left_s=patience.queue_left_s
            )
        elif isinstance(error, MissingBlocksError):
            blocks = [Span(start, end) for start, end in error.missing]
            joining = [node.peer_id for node in nodes.joining]
            what = "a node that is joining" if joining else "a node that serves what is missing"
            wait.change(what, blocks=blocks, peers=joining, left_s=left_s)
        else:
            failed = sorted(nodes.suspected)
            wait.change(
                "a node in place of one that failed",
                blocks=self._lacking(),
                peers=failed,
                left_s=left_s,
            )

    def _lacking(self) -> Sequence[Span]:
        """Blocks without a node; for a chain that never stood, those of the nodes not reached."""
        alive = [link.hop for link in self._route.links if link.lost is None]
        return (not alive and self._route.opener.unreached) or gaps(self._request.span, alive)

    def _give_up(self, last: Exception, *, hopeless: bool) -> Exception:
        if isinstance(last, BusyError):
            waited = f"waited {self._queue_timeout_s:g} s for room"
            return BusyError(f"{last}; {waited}", last.retry_after_s)
        missing = [(span.start, span.end) for span in self._lacking()]
        if isinstance(last, MissingBlocksError):
            missing = list(last.missing)
        ranges = ", ".join(f"{start}:{end}" for start, end in missing) or str(self._request.span)
        waited = f"waited {self._recovery_timeout_s:g} s"
        if hopeless:
            waited = "and none is joining with them"
        blocks = f"blocks {ranges} of {self._request.model_id}"
        if not isinstance(last, MissingBlocksError):
            return MissingBlocksError(
                missing, f"no node with {blocks} could be reached ({waited}): {last}"
            )
        text = f"no node serves {blocks} ({waited}): start one with `nesa-node run`"
        if served := self._route.nodes.served:
            more = f" and {len(served) - MOST_TOLD} more" if len(served) > MOST_TOLD else ""
            text += f"; the swarm serves {', '.join(served[:MOST_TOLD])}{more}"
        return MissingBlocksError(missing, text)
