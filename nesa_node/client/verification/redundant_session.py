"""Session whose blocks several replicas compute, each alone: the largest group is believed.

No replica is told what another one answered, and nothing is sent on before all have answered: a
node cannot copy from a faster one what it did not compute. Replicas that are outvoted are replaced
at that step.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch

from nesa_node.client.session.base import MAX_SESSION_FAILOVERS, DrawnAudits, Failover
from nesa_node.client.session.session import RemoteSession
from nesa_node.client.verification.replica_selection import Replica, ReplicatedSpan
from nesa_node.core.errors import MissingBlocksError, NesaError, WrongActivationsError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.routing.chains import Hop
from nesa_node.swarm.protocol.messages import RowSlice, Want
from nesa_node.verification.agreement import AgreementHistory, AgreementRule

log = get_logger(__name__)

NewSession = Callable[[Span, Replica], RemoteSession]
"""A session of a span at one replica, not open yet."""
NewHistory = Callable[[Span, RemoteSession], AgreementHistory]
"""How outputs of a span are compared, by what an open session's node declares to compute with."""
ReportOutvoted = Callable[[Sequence[PeerId], Span, bytes, str], Awaitable[None]]
"""Gets the nodes of a replica, their blocks, the id of their session, and what they did."""


@dataclass(slots=True)
class _Group:
    """The replicas that compute the blocks `span`."""

    span: Span
    spares: list[Replica]
    """Those that may replace one; each is asked once."""
    members: dict[Replica, RemoteSession] = field(default_factory=dict)
    history: AgreementHistory | None = None
    failure: str = ""
    """Why the last replica could not be used."""


class RedundantSession:
    """`BlockSession` over replicas that check each other by `rule`."""

    noisy_vectors = None

    def __init__(
        self,
        parts: Sequence[ReplicatedSpan],
        rule: AgreementRule,
        *,
        new_session: NewSession,
        new_history: NewHistory,
        report_outvoted: ReportOutvoted,
        rows: int,
        max_tokens: int,
    ) -> None:
        self.rows = rows
        self.max_tokens = max_tokens
        self._rule = rule
        self._groups = [_Group(part.span, list(part.replicas)) for part in parts]
        self._new_session = new_session
        self._new_history = new_history
        self._report_outvoted = report_outvoted
        self._lengths = [0] * rows
        self._failovers: deque[Failover] = deque(maxlen=MAX_SESSION_FAILOVERS)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The nodes, those of the same blocks one after the other."""
        return tuple(
            Hop(hop.peer_id, _shift(hop.span, group.span.start - session.hops[0].span.start))
            for group in self._groups
            for session in group.members.values()
            for hop in session.hops
        )

    @property
    def codecs(self) -> tuple[str, ...]:
        return tuple(codec for session in self._sessions() for codec in session.codecs)

    @property
    def failovers(self) -> tuple[Failover, ...]:
        """Replicas that were left, and replacements within those that compute."""
        within = (loss for session in self._sessions() for loss in session.failovers)
        found = sorted((*self._failovers, *within), key=lambda loss: loss.at)
        return tuple(found[-MAX_SESSION_FAILOVERS:])

    @property
    def session_id(self) -> bytes:
        """That of the first replica."""
        return next((session.session_id for session in self._sessions()), b"")

    @property
    def num_decoding(self) -> int:
        """See `BlockSession.num_decoding`."""
        return max((session.num_decoding for session in self._sessions()), default=0)

    @property
    def drawn_audits(self) -> DrawnAudits:
        return sum((session.drawn_audits for session in self._sessions()), DrawnAudits())

    async def open(self) -> None:
        """Open all sessions. Raises `MissingBlocksError` where too few replicas can be used."""
        await asyncio.gather(*(self._fill(group, []) for group in self._groups))
        for group in self._groups:
            self._check_members(group, self._rule.fewest)
            if self._rule.copies == 1:
                continue  # There is nothing to compare it with.
            first = next(iter(group.members.values()))
            group.history = self._new_history(group.span, first)

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        """See `BlockSession.step`. Raises `WrongActivationsError` where too few replicas agree."""
        for group in self._groups:
            # Of inner blocks all outputs are needed.
            its = want if group is self._groups[-1] else "all"
            hidden_TD = await self._step_group(group, hidden_TD, rows, its)
        for part in rows:
            self._lengths[part.row] += part.count
        return hidden_TD

    async def rollback(self, lengths: Sequence[int]) -> None:
        """See `BlockSession.rollback`."""
        await asyncio.gather(*(each.rollback(lengths) for each in self._sessions()))
        self._lengths = list(lengths)

    async def reorder(self, sources: Sequence[int]) -> None:
        """See `BlockSession.reorder`."""
        await asyncio.gather(*(each.reorder(sources) for each in self._sessions()))
        self._lengths = [self._lengths[source] for source in sources]

    async def finish(self) -> None:
        """See `BlockSession.finish`."""
        await asyncio.gather(*(each.finish() for each in self._sessions()))

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._sessions()))

    def _sessions(self) -> list[RemoteSession]:
        return [session for group in self._groups for session in group.members.values()]

    async def _step_group(
        self, group: _Group, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], want: Want
    ) -> torch.Tensor:
        members = dict(group.members)
        if self._rule.copies == 1:
            (session,) = members.values()
            return await session.step(hidden_TD, rows, want=want)
        used = {replica: _find_nodes(session) for replica, session in members.items()}
        answers = await asyncio.gather(
            *(session.step(hidden_TD, rows, want=want) for session in members.values()),
            return_exceptions=True,
        )
        outputs: dict[Replica, torch.Tensor] = {}
        for replica, answer in zip(members, answers, strict=True):
            if isinstance(answer, torch.Tensor):
                outputs[replica] = answer
            elif isinstance(answer, NesaError):
                await self._leave(group, replica, used[replica], str(answer))
            else:
                raise answer
        self._check_members(group, self._rule.needed)
        replicas = list(outputs)
        assert group.history is not None
        agreeing = await asyncio.to_thread(
            group.history.find_group, replicas, list(outputs.values())
        )
        if len(agreeing) < self._rule.needed:
            blocks = group.span.start, group.span.end
            names = [" → ".join(used[replica]) for replica in replicas]
            raise WrongActivationsError(
                None,
                blocks,
                min(part.position for part in rows),
                f"{', '.join(names)} compute blocks {group.span} differently, and "
                f"at least {self._rule.needed} must agree",
            )
        believed = [replicas[index] for index in agreeing]
        for replica in outputs.keys() - set(believed):
            what = "chains" if self._rule.of_chains else "nodes"
            reason = f"{len(believed)} of {len(replicas)} {what} agree on something else"
            peers = list(dict.fromkeys([*used[replica], *_find_nodes(members[replica])]))
            await self._report_outvoted(peers, group.span, members[replica].session_id, reason)
            await self._leave(group, replica, peers, reason)
        if len(group.members) < self._rule.copies:
            await self._fill(group, await group.members[believed[0]].read_inputs())
        return outputs[believed[0]]

    async def _leave(
        self, group: _Group, replica: Replica, peers: Sequence[PeerId], reason: str
    ) -> None:
        began = time.monotonic()
        log.warning("replica_left", peers=peers, blocks=str(group.span), reason=reason)
        await group.members.pop(replica).close()
        took_ms = (time.monotonic() - began) * 1000
        self._failovers.append(Failover(time.time(), tuple(sorted(peers)), took_ms))

    async def _fill(self, group: _Group, given: Sequence[tuple[RowSlice, torch.Tensor]]) -> None:
        """Open sessions at spares, as many as are missing, and have them compute `given`."""
        while group.spares and (missing := self._rule.copies - len(group.members)) > 0:
            tried, group.spares = group.spares[:missing], group.spares[missing:]
            await asyncio.gather(*(self._add_member(group, each, given) for each in tried))

    async def _add_member(
        self, group: _Group, replica: Replica, given: Sequence[tuple[RowSlice, torch.Tensor]]
    ) -> None:
        session = self._new_session(group.span, replica)
        try:
            await session.open()
            for part, values_LD in given:
                await session.step(values_LD, [part], want="none")
        except NesaError as error:
            log.info("replica_not_opened", peers=sorted(replica), reason=str(error))
            group.failure = f"; {error}"
            await session.close()
        except BaseException:
            await session.close()
            raise
        else:
            group.members[replica] = session

    def _check_members(self, group: _Group, needed: int) -> None:
        if (found := len(group.members)) < needed:
            blocks = group.span.start, group.span.end
            what = "chains" if self._rule.of_chains else "nodes"
            reason = f"{found} {what} of {needed} that are needed compute blocks {group.span}"
            reason += group.failure
            raise MissingBlocksError([blocks], reason)


def _shift(span: Span, by: int) -> Span:
    return Span(span.start + by, span.end + by)


def _find_nodes(session: RemoteSession) -> list[PeerId]:
    """Nodes that a replica's session uses, by their blocks, and those that it lost."""
    lost = (peer for loss in session.failovers for peer in loss.lost)
    return list(dict.fromkeys([*(hop.peer_id for hop in session.hops), *lost]))
