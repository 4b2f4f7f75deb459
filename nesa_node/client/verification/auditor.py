"""A client's audits: which sessions are drawn, what is computed again, and what follows.

A node cannot know that it is audited before it has sealed what it did: draws are the client's
secret, and probes beside the work, which a node could answer honestly, are not used.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nesa_node.client.session.hop import HopLink
from nesa_node.client.verification.adapter_fetch import AdapterFetcher
from nesa_node.client.verification.audit_history import AuditHistory, AuditOutcome
from nesa_node.client.verification.audit_record import AuditRecord
from nesa_node.client.verification.kept_session import KeptSession, write_session
from nesa_node.client.verification.node_recomputation import NodeRecomputation
from nesa_node.client.verification.recomputation import (
    missing_bytes,
    recompute,
    recompute_otherwise,
)
from nesa_node.client.verification.referee import Referee, pick_known
from nesa_node.client.verification.session_audit import (
    ContradictionError,
    DisputeError,
    HopWork,
    NotAuditedError,
    SealMismatchError,
    SessionAudit,
    SessionAuditor,
)
from nesa_node.compression.codecs import UNCOMPRESSED
from nesa_node.compression.tensors import decode, encode
from nesa_node.core.decision_log import DecisionLog, LoggedDecision
from nesa_node.core.errors import NesaError, WrongActivationsError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.engine.adapters.peft_folder import PeftFolder
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.routing.chains import Hop
from nesa_node.swarm.evidence import Proof
from nesa_node.swarm.openings import OpeningSender
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.messages import Computation
from nesa_node.swarm.protocol.stream import peer_timeout
from nesa_node.verification.comparison import (
    Comparison,
    ComputationKind,
    Measure,
    compare_rows,
    find_threshold,
    is_confirmed,
)
from nesa_node.verification.schemes import DEFAULT_SCHEME, SEED_BYTES

log = get_logger(__name__)

MAX_TOKEN_BLOCKS = 1 << 16
"""Tokens times blocks from which on an audit is made less often: the same work on average. Longer
sessions are computed again whole or not at all, so that no part of them is safe to lie in."""
MAX_WAITING = 8
"""Most audits at once, made one after another: each holds a session's hidden states."""
COLLECT_TIMEOUT_S = 20.0
"""Time for a session's work at one hop to be sealed and disclosed, before the session closes."""
CLOSE_TIMEOUT_S = 60.0
"""Time on closing for audits that were drawn."""


@dataclass(frozen=True, slots=True)
class SwarmEffects:
    """What outcomes of audits change in routes and in the swarm."""

    avoid: Callable[[PeerId], None]
    """Called with each of two nodes that contradict each other: other ones are to be preferred for
    a while."""
    report_wrong: Callable[[PeerId], None]
    """Called with each node that failed, to tell the swarm: it avoids the node for a while."""
    publish_proof: Callable[[Proof], Coroutine[Any, Any, None]]
    """Called with a node's contradiction of itself, for other members to check."""
    openings: OpeningSender | None
    """Sends wrong work to other nodes, to check it; None: its values are shown to none."""


class Auditor(SessionAuditor):
    """Audits of one connection's sessions. `rate` is the share of hops whose work is audited.

    `history` bars nodes that failed; `decisions` has each audit, for `nesa-node explain`. `scheme`
    names how outputs are compared (`nesa_node.verification.schemes.SCHEMES`).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rate: float,
        history: AuditHistory,
        *,
        rng: random.Random,
        decisions: DecisionLog | None = None,
        scheme: str = DEFAULT_SCHEME,
    ) -> None:
        self.history = history
        self.outcomes: Counter[AuditOutcome] = Counter()
        self.nodes: NodeRecomputation | None = None
        """Other nodes that may compute work again; None: none may."""
        self.adapters: AdapterFetcher | None = None
        """None: sessions with adapters are not audited."""
        self.prefers_nodes = False
        """Whether they do so even where this client has the weights."""
        self.effects: SwarmEffects | None = None
        """None: outcomes change nothing but `history`."""
        self.keep_session: Path | None = None
        """Folder for the work of audited hops, to be audited again; None: it is not kept."""
        self._checkpoint = checkpoint
        self._rate = rate
        self._rng = rng
        self._decisions = decisions
        self._scheme = scheme
        self._tasks = TaskSet()
        self._turn = asyncio.Lock()

    def draws(self, peer: PeerId) -> bool:
        """See `SessionAuditor`."""
        return self._rng.random() < self.history.draw_rate(peer, self._rate)

    @property
    def barred(self) -> Mapping[PeerId, str]:
        """See `SessionAuditor`."""
        return self.history.barred

    async def audit(
        self, session: SessionAudit, lengths: Sequence[int]
    ) -> list[asyncio.Task[WrongActivationsError | None]]:
        """See `SessionAuditor`."""
        started = [
            self._start(self._finish_lost(session.session, link, "it was lost during the session"))
            for link in session.lost_links()
        ]
        collected: list[HopWork] = []
        for link in session.audited_links() if any(lengths) else ():
            if len(self._tasks) >= MAX_WAITING or self._is_left_out(link.hop, sum(lengths)):
                continue
            try:
                async with peer_timeout(
                    link.hop.peer_id, COLLECT_TIMEOUT_S, "its work was collected"
                ):
                    work = await session.collect(link, lengths)
            except SealMismatchError as error:
                self._publish_proof(error)
                record = self._record(link.hop, "failed", str(error))
                started.append(self._start(self._finish(session.session, record)))
            except DisputeError as error:
                records = await self._resolve(session, error, lengths)
                started += [self._start(self._finish(session.session, each)) for each in records]
            except (NesaError, OSError) as error:
                if link.is_lost:
                    finished = self._finish_lost(session.session, link, str(error))
                else:
                    record = self._record(link.hop, "not audited", str(error))
                    finished = self._finish(session.session, record)
                started.append(self._start(finished))
            else:
                collected.append(work)
                started.append(self._start(self._audit_work(work)))
        if collected and self.keep_session is not None:
            await asyncio.to_thread(self._keep_work, self.keep_session, collected)
        return [task for task in started if task is not None]

    async def _resolve(
        self, session: SessionAudit, dispute: DisputeError, lengths: Sequence[int]
    ) -> list[AuditRecord]:
        """Of two nodes that contradict each other, the first may contradict its own seal, too."""
        before, link = dispute.links
        try:
            async with peer_timeout(
                before.hop.peer_id, COLLECT_TIMEOUT_S, "its work was collected"
            ):
                await session.collect(before, lengths)
        except SealMismatchError as error:
            self._publish_proof(error)
            records = [self._record(link.hop, "not audited", str(dispute))]
            if not before.is_audited:  # else it fails by its own audit
                records.append(self._record(before.hop, "failed", str(error)))
            return records
        except (NesaError, OSError) as error:
            log.info("dispute_not_resolved", peer=before.hop.peer_id, reason=str(error))
        return [self._record(each.hop, "disputed", str(dispute)) for each in dispute.links]

    def _publish_proof(self, error: SealMismatchError) -> None:
        if isinstance(error, ContradictionError) and self.effects is not None:
            self._tasks.start(self.effects.publish_proof(error.proof), name="evidence")

    async def bar_proven(self, proof: Proof) -> None:
        """Bar a node that contradicted itself, by seals that another member published."""
        log.error("evidence_holds", peer=proof.accused, reason=proof.reason)
        reason = f"it contradicts itself: {proof.reason}"
        await asyncio.to_thread(self.history.bar, proof.accused, reason)

    def _start(
        self, audit: Coroutine[Any, Any, WrongActivationsError | None]
    ) -> asyncio.Task[WrongActivationsError | None] | None:
        return self._tasks.start(audit, name="audit")

    @property
    def family(self) -> str:
        return str(self._checkpoint.config.model_type)

    def kind_of(self, declared: Computation, codec: str) -> ComputationKind:
        """The kind of a computation, by which bounds are fitted."""
        return ComputationKind(
            self.family,
            declared.dtype,
            declared.quantization,
            declared.backend,
            codec,
        )

    async def record_outvoted(
        self, peers: Sequence[PeerId], span: Span, session: bytes, rule: str, reason: str
    ) -> None:
        """Record that other nodes, by `rule`, agree on something else than `peers` answered.

        Of several, a chain, none is named: it is not known which of them was wrong.
        """
        record = replace(self._record(Hop(peers[0], span), "outvoted", reason), auditor=rule)
        if len(peers) > 1:
            record = replace(
                record,
                peer=PeerId(""),
                chain=tuple(peers),
                reason=f"{reason}; which node of the chain was wrong is not known",
            )
        await self._finish(session, record)

    def _keep_work(self, folder: Path, works: Sequence[HopWork]) -> None:
        """Write the work of a session's audited hops to a file."""
        kept = KeptSession(
            works[0].session,
            self._checkpoint.name,
            compute_model_id(self._checkpoint),
            time.time(),
            [(work, self.history.draw_rate(work.peer, self._rate)) for work in works],
        )
        try:
            log.info("session_kept", path=str(write_session(folder, kept)))
        except OSError as error:
            log.warning("session_not_kept", folder=str(folder), reason=str(error))

    async def judge(self, work: HopWork) -> AuditRecord:
        """Outcome of an audit of `work`, of which nothing is remembered."""
        try:
            return (await self._compute_again(work, Hop(work.peer, work.span)))[0]
        except (NesaError, OSError) as error:
            return self.describe_outcome(work, "not audited", str(error))

    def describe_outcome(self, work: HopWork, outcome: AuditOutcome, reason: str) -> AuditRecord:
        """Record of an outcome without a comparison."""
        return self._record(Hop(work.peer, work.span), outcome, reason)

    async def close(self) -> None:
        """Wait for audits that were drawn, but not for long."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._tasks.join()
        except TimeoutError:
            log.warning("audits_not_finished", audits=len(self._tasks))
            await self._tasks.close()

    def _is_left_out(self, hop: Hop, tokens: int) -> bool:
        """Draw whether a session that is longer than usual is not audited."""
        size = tokens * len(hop.span)
        return self._rng.random() * size >= MAX_TOKEN_BLOCKS

    async def _audit_work(self, work: HopWork) -> WrongActivationsError | None:
        hop = Hop(work.peer, work.span)
        async with self._turn:
            try:
                records = await self._compute_again(work, hop)
            except (NesaError, OSError) as error:
                records = [self._record(hop, "not audited", str(error))]
        # All are to be kept, and only the first is about the session.
        wrong, *_ = [await self._finish(work.session, record) for record in records]
        if (records[0].outcome, records[0].peer) == ("failed", work.peer):
            self._open_work(work)
        return wrong

    def _open_work(self, work: HopWork) -> None:
        openings = None if self.effects is None else self.effects.openings
        rows = work.opened_rows()
        if openings is not None and work.sealed is not None and rows:
            seal, secret = work.sealed.seal, work.sealed.secret
            sending = openings.send(work.peer, work.span, seal, secret, rows)
            self._tasks.start(sending, name="opening")

    async def _compute_again(self, work: HopWork, hop: Hop) -> list[AuditRecord]:
        if not work.adapter:
            return await self._compute_with(work, hop, None)
        if self.adapters is None:
            raise NotAuditedError("its adapter is not here")
        async with self.adapters.fetched(work.adapter) as adapter:
            return await self._compute_with(work, hop, adapter)

    async def _compute_with(
        self, work: HopWork, hop: Hop, adapter: PeftFolder | None
    ) -> list[AuditRecord]:
        missing = await asyncio.to_thread(missing_bytes, self._checkpoint, work)
        if missing or self.prefers_nodes:
            if self.nodes is None:
                raise NotAuditedError(
                    f"its weights, {missing:,} bytes, are not here, and other nodes are not to see "
                    "the hidden states of this session (--auditors nodes)"
                )
            return await self._audit_at_node(work, hop, self.nodes, adapter)
        found, excused = await asyncio.to_thread(self._compare, work, adapter)
        record = self._describe(work, hop, found)
        return [replace(record, excused=excused)]

    def _draw_measure(self) -> Measure:
        """The work is sealed: nodes cannot fit it to the seed any more."""
        return Measure(self._scheme, secrets.token_bytes(SEED_BYTES))

    async def _audit_at_node(
        self, work: HopWork, hop: Hop, nodes: NodeRecomputation, adapter: PeftFolder | None
    ) -> list[AuditRecord]:
        if any(len(row.prefix_LD) for row in work.rows):
            raise NotAuditedError("the inputs of a reused prefix are not known")
        holders = await nodes.find_holders(work)
        if not holders:
            raise NotAuditedError("no other node has all its blocks in this kind of weights")
        other = holders[0]
        inputs = [row.inputs_LD for row in work.rows]
        outputs = await nodes.run(other, work.span, inputs, work.computation, work.adapter)
        kind = self.kind_of(work.computation, work.codec)
        measure = self._draw_measure()
        found = compare_rows(
            [row.outputs_PD for row in work.rows],
            pick_known(outputs, work),
            find_threshold(kind, len(work.span), measure.scheme),
            measure,
        )
        record = replace(self._describe(work, hop, found), auditor=other)
        if record.outcome != "failed":
            return [record]
        if self._checkpoint.family.router is not None:
            raise NotAuditedError(
                f"{other} disagrees, but which of a mixture's tokens are undecided between experts "
                "is known only where this client computes them"
            )
        referee = Referee(self._checkpoint, nodes, measure, adapter)
        liar = await referee.find_liar(work, replace(kind, codec="none"), other, outputs)
        failed = self._record(Hop(liar.peer, liar.span), "failed", liar.reason)
        if liar.peer == work.peer:
            return [replace(failed, position=record.position)]
        reason = f"{other}, which computed it again, did so wrongly"
        return [self._record(hop, "not audited", reason), failed]

    def _compare(self, work: HopWork, adapter: PeftFolder | None) -> tuple[Comparison, int]:
        """Errors of `work`, and how many of its tokens are excused."""
        measure = self._draw_measure()
        kind = self.kind_of(work.computation, work.codec)
        allowed = find_threshold(kind, len(work.span), measure.scheme)
        rows = [row.outputs_PD for row in work.rows]
        once = recompute(self._checkpoint, work, adapter)
        given, expected = once.judged(rows, once.outputs)
        found = compare_rows(given, expected, allowed, measure)
        found = replace(found, row=once.judged_rows()[found.row])
        excused = sum(map(len, rows)) - sum(map(len, given))
        if found.outcome != "failed":
            return found, excused
        as_sent = partial(_pass_through_codec, codec=work.codec)
        again: list[Sequence[torch.Tensor]] = []
        # From weights that are read anew.
        for outputs in recompute_otherwise(self._checkpoint, work, adapter):
            again.append(outputs)
            given, expected, *further = once.judged(rows, once.outputs, *again)
            if not is_confirmed(given, expected, further, allowed, measure, as_sent=as_sent):
                if not found.is_excusable(rows[0].dtype):
                    raise NotAuditedError(
                        "further computations of this client do not confirm its errors"
                    )
                return replace(found, outcome="passed"), excused
        return found, excused

    def _record(self, hop: Hop, outcome: AuditOutcome, reason: str) -> AuditRecord:
        blocks = hop.span.start, hop.span.end
        return AuditRecord(
            peer=hop.peer_id,
            blocks=blocks,
            outcome=outcome,
            drawn_with=self.history.draw_rate(hop.peer_id, self._rate),
            scheme=self._scheme,
            reason=reason,
        )

    def _describe(self, work: HopWork, hop: Hop, found: Comparison) -> AuditRecord:
        first = found.first_wrong
        outcome: AuditOutcome = found.outcome
        reason = ""
        if found.outcome == "passed" and (found.of_allowed or 0.0) > 1:
            first, reason = None, "this client's own computations differ by as much"
        if found.outcome == "failed" and not work.is_own:
            outcome = "unclear"
            reason = "its cache had tokens of an earlier session or node"
            if work.codec != UNCOMPRESSED:
                # An honest node may have had other inputs than those that are known here.
                outcome, reason = "not audited", f"{reason}, whose links lost something"
        return replace(
            self._record(hop, outcome, reason),
            tokens=found.tokens,
            worst=found.worst,
            mean=found.mean,
            quantiles=found.quantiles,
            of_allowed=found.of_allowed,
            position=None if first is None else work.rows[found.row].positions[first],
        )

    async def _finish_lost(
        self, session: bytes, link: HopLink, reason: str
    ) -> WrongActivationsError | None:
        record = self._record(link.hop, "not audited", reason)
        await asyncio.to_thread(self.history.record_lost, link.hop.peer_id)
        return await self._finish(session, record)

    async def _finish(self, session: bytes, record: AuditRecord) -> WrongActivationsError | None:
        self.outcomes[record.outcome] += 1
        if record.outcome == "disputed" and self.effects is not None:
            self.effects.avoid(record.peer)
        if record.outcome == "failed" and self.effects is not None:
            self.effects.report_wrong(record.peer)
        if record.outcome in ("failed", "outvoted"):
            log.error("wrong_activations", **asdict(record))
        else:
            log.info("node_audited", **asdict(record))
        # Other programs of this user may hold the files' locks.
        await asyncio.to_thread(self._keep, session, record)
        return record.to_error()

    def _keep(self, session: bytes, record: AuditRecord) -> None:
        if record.outcome == "passed":
            self.history.record_passed(record.peer)
        elif record.outcome == "failed":
            self.history.bar(record.peer, record.describe_fault())
        elif record.outcome in ("unclear", "disputed", "outvoted"):
            for peer in record.chain or (record.peer,):
                self.history.disown_caches(peer)
        if self._decisions is not None:
            try:
                self._decisions.add(
                    LoggedDecision("audit", session.hex(), time.time(), asdict(record))
                )
            except OSError as error:
                log.warning("decision_not_logged", reason=str(error))


def _pass_through_codec(output_TD: torch.Tensor, codec: str) -> torch.Tensor:
    """`output_TD` as a receiver decodes it from the codec."""
    if codec == UNCOMPRESSED:
        return output_TD
    meta, payload = encode(output_TD, codec=codec)
    return decode(meta, payload, max_bytes=meta.max_nbytes)
