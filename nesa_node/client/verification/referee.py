"""Which of two nodes lies that computed the same blocks differently: their dispute is halved.

Both are asked, in ordinary sessions, for half of the blocks, from what both agree on; down to one
block, whose weights the client has or fetches. A node that answers honestly now contradicts what it
sealed before.

L tokens of a row, P positions of it whose outputs are known, D hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nesa_node.client.verification.node_recomputation import NodeRecomputation
from nesa_node.client.verification.recomputation import (
    missing_bytes,
    recompute,
    recompute_otherwise,
)
from nesa_node.client.verification.session_audit import HopWork, NotAuditedError, RowWork
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.adapters.peft_folder import PeftFolder
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.verification.comparison import (
    PERTURBATIONS,
    ComputationKind,
    Measure,
    compare_rows,
    find_threshold,
    is_confirmed,
    perturb,
)

MAX_FETCHED_BYTES = 2**31
"""Most bytes of weights that are fetched to settle a dispute."""

Rows = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A node that computed `span` wrongly, and why that is known."""

    peer: PeerId
    span: Span
    reason: str


class Referee:
    """Settles disputes between an audited node and one that computed its work again."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        nodes: NodeRecomputation,
        measure: Measure,
        adapter: PeftFolder | None,
    ) -> None:
        """`adapter` is that of the session."""
        self._checkpoint = checkpoint
        self._nodes = nodes
        self._measure = measure
        self._adapter = adapter

    async def find_liar(
        self, work: HopWork, kind: ComputationKind, other: PeerId, outputs: Rows
    ) -> Verdict:
        """The audited node, or `other`, which computed `outputs` [L, D].

        Raises `NotAuditedError` where neither is found, and what sessions at the two raise.
        """
        states: Rows = [row.inputs_LD for row in work.rows]
        varied = [[perturb(row_LD) for row_LD in states] for _ in range(PERTURBATIONS)]
        again = await self._run(work.peer, work.span, states, work)
        by_token = await self._run(work.peer, work.span, states, work, by_token=True)
        perturbed = [await self._run(work.peer, work.span, each, work) for each in varied]
        given = [row.outputs_PD for row in work.rows]
        expected, *further = (pick_known(each, work) for each in (again, by_token, *perturbed))
        if self._is_wrong(kind, work.span, given, expected, further):
            why = "what it computes now is not what it sealed"
            return Verdict(work.peer, work.span, why)
        if not self._differ(kind, work.span, again, outputs):
            raise NotAuditedError(f"{other} agrees with what it computes now")
        peers = work.peer, other
        start, end = work.span.start, work.span.end
        disputed = again, outputs
        """What each gave for the blocks from where both agree to `end`."""
        while end - start > 1:
            half = Span(start, (start + end) // 2)
            halves = await self._run_both(peers, half, states, work)
            if self._differ(kind, half, *halves):
                end, disputed = half.end, halves
            else:
                start, states = half.end, halves[1]
        block = Span(start, end)
        ours, theirs = await self._run_both(peers, block, states, work)
        if self._differ(kind, block, ours, theirs):
            expected, *further = await self._compute_block(work, other, block, states)
            reason, disputed = "this client computed the block", (ours, theirs)
        else:
            # Block by block both say the same: one of them said otherwise of several at once.
            expected, block = theirs, Span(work.span.start, end)
            further = [
                await self._run_in_turn(peer, block, each, work)
                for peer in peers
                for each in varied
            ]
            reason = "of its blocks one after the other it says something else than of all at once"
        found = [
            Verdict(peer, block, reason)
            for peer, claimed in zip(peers, disputed, strict=True)
            if self._is_wrong(kind, block, claimed, expected, further)
        ]
        if len(found) != 1:
            # Of neither, the dispute is over; of both, the bounds may be another model's.
            raise NotAuditedError(f"its dispute with {other} could not be settled")
        return found[0]

    async def _compute_block(
        self, work: HopWork, other: PeerId, block: Span, states: Rows
    ) -> list[Rows]:
        """Outputs by this client: at once, token by token, and of perturbed inputs."""
        rows = tuple(
            RowWork(row_LD[:0], row_LD, tuple(range(len(row_LD))), row_LD) for row_LD in states
        )
        alone = replace(work, span=block, first_block=block.start, rows=rows)
        if (nbytes := missing_bytes(self._checkpoint, alone)) > MAX_FETCHED_BYTES:
            raise NotAuditedError(
                f"{other} disagrees on block {block.start}, whose weights, {nbytes:,} bytes, are "
                "not here"
            )
        asked = self._checkpoint, alone, self._adapter
        once = await asyncio.to_thread(recompute, *asked)
        return [once.outputs, *await asyncio.to_thread(list, recompute_otherwise(*asked))]

    async def _run_in_turn(self, peer: PeerId, span: Span, states: Rows, work: HopWork) -> Rows:
        """Outputs of `span` by a session for each block."""
        for block in range(span.start, span.end):
            states = await self._run(peer, Span(block, block + 1), states, work)
        return states

    async def _run_both(
        self, peers: tuple[PeerId, PeerId], span: Span, states: Rows, work: HopWork
    ) -> tuple[Rows, Rows]:
        return (
            await self._run(peers[0], span, states, work),
            await self._run(peers[1], span, states, work),
        )

    async def _run(
        self, peer: PeerId, span: Span, states: Rows, work: HopWork, *, by_token: bool = False
    ) -> Rows:
        return await self._nodes.run(
            peer, span, states, work.computation, work.adapter, by_token=by_token
        )

    def _is_wrong(
        self,
        kind: ComputationKind,
        span: Span,
        given: Rows,
        expected: Rows,
        further: Sequence[Rows],
    ) -> bool:
        allowed = find_threshold(kind, len(span), self._measure.scheme)
        return is_confirmed(given, expected, further, allowed, self._measure)

    def _differ(self, kind: ComputationKind, span: Span, given: Rows, expected: Rows) -> bool:
        allowed = find_threshold(kind, len(span), self._measure.scheme)
        return compare_rows(given, expected, allowed, self._measure).outcome == "failed"


def pick_known(outputs: Rows, work: HopWork) -> Rows:
    """Of outputs [L, D] those [P, D] that are known of the audited node."""
    return [out_LD[list(row.positions)] for out_LD, row in zip(outputs, work.rows, strict=True)]
