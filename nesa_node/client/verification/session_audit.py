"""What an audit of a session needs: what a hop was given and gave, checked against its seal.

T packed tokens, L tokens of a row, P positions of it whose outputs are known, D hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nesa_node.client.recovery.retry import StepReplay
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.hop import HopLink
from nesa_node.client.session.route import SessionRoute
from nesa_node.compression import tensors
from nesa_node.compression.codecs import EXACT, codec_name
from nesa_node.core.errors import (
    NesaError,
    ProtocolError,
    WrongActivationsError,
)
from nesa_node.core.ids import PeerId, Span
from nesa_node.swarm.evidence import Proof, find_proof
from nesa_node.swarm.openings import OpenedRow
from nesa_node.swarm.protocol.messages import Computation, RowSlice
from nesa_node.swarm.protocol.replay_buffer import ReplayBuffer
from nesa_node.swarm.protocol.seal_messages import (
    Seal,
    SealStatement,
    open_seal,
    sealed_rows,
)
from nesa_node.verification.seal_tree import SessionSeals


@dataclass(frozen=True, slots=True, eq=False)
class RowWork:
    """One row of a hop's work."""

    prefix_LD: torch.Tensor
    """Inputs of the session's first block for the positions whose inputs at the hop are not known:
    all nodes reused them."""
    inputs_LD: torch.Tensor
    """Inputs of the hop for the positions after those."""
    positions: tuple[int, ...]
    outputs_PD: torch.Tensor
    row: int = 0
    """Which of the session's rows it is."""


@dataclass(frozen=True, slots=True)
class SealedWith:
    """A hop's seal, and what is needed to make its roots again."""

    seal: Seal
    secret: bytes
    start_lengths: tuple[int, ...]
    """Tokens that each row had when the hop opened the session: they are not in the seal."""


@dataclass(frozen=True, slots=True, eq=False)
class HopWork:
    """A hop's work in a session, as it sealed it."""

    peer: PeerId
    span: Span
    session: bytes
    """The session's id at the client."""
    first_block: int
    """Of the session."""
    computation: Computation
    codec: str
    """How its outputs were encoded, without version and parameters; a level where links choose."""
    rows: tuple[RowWork, ...]
    is_own: bool
    """Whether the hop computed all of its cache in this session: else an error may be another's."""
    adapter: bytes = b""
    """Digest of the session's adapter; empty: none."""
    sealed: SealedWith | None = None
    """None where the work is no sealed one, such as a part of it."""

    def opened_rows(self) -> list[OpenedRow]:
        """What nodes with the same blocks can check; nothing where they could not."""
        if not self.is_own or self.adapter:
            return []
        return [
            OpenedRow(row.row, row.inputs_LD, row.positions, row.outputs_PD)
            for row in self.rows
            if row.positions
        ]


class NotAuditedError(NesaError):
    """An audit that could not be made. The message says why."""


class SealMismatchError(NesaError):
    """A hop's seal is not of what it was sent or what it sent."""


class ContradictionError(SealMismatchError):
    """A hop's seals of a session contradict each other, which any peer can check."""

    def __init__(self, proof: Proof) -> None:
        super().__init__(f"it contradicts itself: {proof.reason}")
        self.proof = proof


class DisputeError(NesaError):
    """Two neighbours say otherwise of what passed between them: one of the two is wrong."""

    def __init__(self, before: HopLink, link: HopLink) -> None:
        peers = link.hop.peer_id, before.hop.peer_id
        super().__init__("what {} sealed as its inputs is not what {} disclosed".format(*peers))
        self.links = (before, link)


_Part = tuple[RowSlice, torch.Tensor]
"""Consecutive positions of a row, and their values [L, D]."""


class SessionAudit:
    """Collects the work of a session's audited hops, once it is sealed and before it is closed."""

    def __init__(self, route: SessionRoute, request: RouteRequest, replay: StepReplay) -> None:
        self._route = route
        self._request = request
        self._replay = replay

    @property
    def session(self) -> bytes:
        """The session's id at the client."""
        return self._route.session

    def audited_links(self) -> list[HopLink]:
        """Links to collect the work of: none where the session ended within a step."""
        if any(stage.in_flight for stage in self._replay.stages):
            return []
        lost = self.lost_links()
        return [link for link in self._route.links if link.is_audited and link not in lost]

    def lost_links(self) -> list[HopLink]:
        """Links whose work was to be audited, and that failed while the session went on."""
        return self._route.lost_audits

    async def collect(self, link: HopLink, lengths: Sequence[int]) -> HopWork:
        """The work of `link` on `lengths[row]` tokens of each row.

        Raises `NotAuditedError`, `SealMismatchError` where the hop's seal is of something else than
        the client itself sent to it or had from it, `ContradictionError`, `DisputeError`, and what
        requests to nodes raise: `PeerUnreachableError` where a node is lost, `link.is_lost` if it
        is this one.
        """
        if link.opened is None or link.opened.computation is None:
            raise NotAuditedError("its version seals nothing")
        # Sealed first: what is asked for next tells the node that it is audited.
        seal = await self._request_seal(link)
        if proof := await asyncio.to_thread(find_proof, link.hop.peer_id, tuple(link.seals)):
            raise ContradictionError(proof)
        inputs = await self._find_inputs(link, lengths)
        outputs = await self._find_outputs(link, lengths)
        sealed = open_seal(seal, link.hop.peer_id)
        self._check_seal(link, sealed, lengths, inputs, outputs)
        rows = tuple(await self._join_rows(inputs, outputs, lengths))
        return HopWork(
            peer=link.hop.peer_id,
            span=link.hop.span,
            session=self.session,
            first_block=self._request.span.start,
            computation=link.opened.computation,
            codec=codec_family(self._request.options.quality),
            rows=rows,
            is_own=not any(link.start_lengths) and not any(len(row.prefix_LD) for row in rows),
            adapter=self._request.adapter,
            sealed=SealedWith(seal, link.secret, tuple(link.start_lengths)),
        )

    async def _request_seal(self, link: HopLink) -> Seal:
        try:
            return await link.request_seal()
        except ProtocolError as error:
            if link.is_lost:
                raise
            raise SealMismatchError(f"it does not seal what it did: {error}") from error

    async def _find_inputs(self, link: HopLink, lengths: Sequence[int]) -> list[_Part]:
        if (before := self._node_before(link)) is None:
            return await read_buffer(self._replay.inputs_of(link), lengths)
        try:
            return await self._have_disclosed(before, lengths)
        except ProtocolError as error:
            peer = before.hop.peer_id
            raise NotAuditedError(f"{peer} before it disclosed nothing: {error}") from error

    async def _find_outputs(self, link: HopLink, lengths: Sequence[int]) -> list[_Part]:
        if (kept := self._replay.outputs_of(link)) is not None and self._answers_client(link):
            return await read_buffer(kept, lengths)
        try:
            return await self._have_disclosed(link, lengths)
        except ProtocolError as error:
            what = f"it does not disclose what it sealed: {error}"
            raise SealMismatchError(what) from error

    def _node_before(self, link: HopLink) -> HopLink | None:
        """The node that sent `link` its inputs; None: this client did."""
        at = self._route.links.index(link)
        return self._route.links[at - 1] if at and self._request.is_chain else None

    def _answers_client(self, link: HopLink) -> bool:
        return not self._request.is_chain or link is self._route.links[-1]

    async def _have_disclosed(self, link: HopLink, lengths: Sequence[int]) -> list[_Part]:
        """What `link` pushed to the hop after it."""
        rows = tuple(
            RowSlice(row, start, length - start)
            for row, (start, length) in enumerate(zip(link.start_lengths, lengths, strict=True))
            if length > start
        )
        parts: list[_Part] = []
        for message, payload in await link.disclose(rows) if rows else []:
            shape = sum(part.count for part in message.rows), self._request.hidden_size
            if (message.tensor.dtype, message.tensor.shape) != (self._request.dtype, shape):
                raise ProtocolError("bad_tensor", "what was disclosed has another shape")
            if not all(_is_within(part, rows) for part in message.rows):
                raise ProtocolError("bad_rows", "other positions were disclosed than asked for")
            values_TD = tensors.decode(message.tensor, payload, max_bytes=message.tensor.max_nbytes)
            parts += _split_rows(message.rows, values_TD)
        return parts

    def _check_seal(
        self,
        link: HopLink,
        sealed: SealStatement,
        lengths: Sequence[int],
        inputs: Sequence[_Part],
        outputs: Sequence[_Part],
    ) -> None:
        # After a failover it is less sure what a node should have sealed than what it computed.
        is_plain = self._route.num_builds == 1 and not any(link.start_lengths)
        mismatch = SealMismatchError if is_plain else NotAuditedError
        seals = SessionSeals(link.secret, self._request.rows)
        _add_parts(seals.add_inputs, inputs, link.start_lengths)
        _add_parts(seals.add_outputs, outputs, link.start_lengths)
        for row, (given, known) in enumerate(
            zip(sealed.rows, sealed_rows(seals.roots()), strict=True)
        ):
            if lengths[row] <= link.start_lengths[row]:
                # Nothing passed that is still there; the node's tree may be empty, or all absent.
                continue
            if given.length != max(lengths[row], known.length):
                what = f"row {row} is sealed with {given.length} tokens, it has {lengths[row]}"
                raise mismatch(what)
            if given.inputs != known.inputs:
                if (before := self._node_before(link)) is None:
                    raise mismatch("its seal is not of what it was sent")
                if is_plain:
                    raise DisputeError(before, link)
                raise NotAuditedError("its seal is not of what the node before it disclosed")
            if given.outputs != known.outputs:
                what = "sent" if self._answers_client(link) else "disclosed"
                raise mismatch(f"its seal is not of what it {what}")

    async def _join_rows(
        self, inputs: Sequence[_Part], outputs: Sequence[_Part], lengths: Sequence[int]
    ) -> list[RowWork]:
        rows: list[RowWork] = []
        for row, length in enumerate(lengths):
            first, inputs_LD = _join(inputs, row, self._request.hidden_size)
            given = [(part, values_LD) for part, values_LD in outputs if part.row == row]
            if not given:
                continue
            if first + len(inputs_LD) != length:
                raise NotAuditedError("its inputs are not all known")
            rows.append(
                RowWork(
                    await self._read_prefix(row, first if len(inputs_LD) else length),
                    inputs_LD,
                    tuple(
                        at
                        for part, _ in given
                        for at in range(part.position, part.position + part.count)
                    ),
                    torch.cat([values_LD for _, values_LD in given]),
                    row,
                )
            )
        if not rows:
            raise NotAuditedError("it gave no outputs")
        return rows

    async def _read_prefix(self, row: int, length: int) -> torch.Tensor:
        """Inputs of the session's first block for the first positions of a row."""
        until = [0] * self._request.rows
        until[row] = length
        parts = await read_buffer(self._replay.first_inputs, until)
        first, values_LD = _join(parts, row, self._request.hidden_size)
        if first or len(values_LD) != length:
            raise NotAuditedError("the inputs of a reused prefix are not known")
        return values_LD


class SessionAuditor(Protocol):
    """Draws a session's hops when they are opened, and audits them when it closes."""

    @property
    def barred(self) -> Mapping[PeerId, str]:
        """Nodes that failed, and why."""
        ...

    def draws(self, peer: PeerId) -> bool:
        """Whether the session's work at `peer` is audited."""
        ...

    async def audit(
        self, session: SessionAudit, lengths: Sequence[int]
    ) -> list[asyncio.Task[WrongActivationsError | None]]:
        """Collect the work of drawn hops before the session closes; it is audited afterwards.

        Each task returns what is wrong with a hop's work, if anything is.
        """
        ...


def find_mismatch(work: HopWork) -> str | None:
    """What of a hop's work is not as its seal says; None: nothing.

    Raises `ProtocolError("bad_seal")` for a seal that its node did not sign.
    """
    assert work.sealed is not None
    stated = open_seal(work.sealed.seal, work.peer)
    if stated.blocks != (work.span.start, work.span.end):
        return f"its seal is of blocks {Span(*stated.blocks)}"
    if stated.computation != work.computation:
        return f"its seal declares {stated.computation}"
    seals = SessionSeals(work.sealed.secret, len(stated.rows))
    starts = work.sealed.start_lengths
    for row in work.rows:
        first = len(row.prefix_LD)
        inputs = [(RowSlice(row.row, first, len(row.inputs_LD)), row.inputs_LD)]
        _add_parts(seals.add_inputs, inputs if len(row.inputs_LD) else [], starts)
        outputs = [
            (RowSlice(row.row, position, 1), output_D[None])
            for position, output_D in zip(row.positions, row.outputs_PD, strict=True)
        ]
        _add_parts(seals.add_outputs, outputs, starts)
    known = sealed_rows(seals.roots())
    for row in work.rows:
        given, made = stated.rows[row.row], known[row.row]
        for what in ("length", "inputs", "outputs"):
            if getattr(given, what) != getattr(made, what):
                return f"the {what} of row {row.row} are not those of its seal"
    return None


def codec_family(quality: str) -> str:
    """Family of the codec that the quality names; `none` for those that lose nothing."""
    family = codec_name(quality).partition("@")[0]
    return "none" if family in (EXACT, "lossless") else family


async def read_buffer(kept: ReplayBuffer, until: Sequence[int]) -> list[_Part]:
    """Parts of each row's first `until[row]` positions, decoded."""
    parts: list[_Part] = []
    for held in kept.iter_steps([0] * len(until), until):
        step = await held.materialize()
        parts += _split_rows(step.rows, step.decode())
    return parts


def _is_within(part: RowSlice, rows: Sequence[RowSlice]) -> bool:
    return any(
        part.row == whole.row
        and part.position >= whole.position
        and part.position + part.count <= whole.position + whole.count
        for whole in rows
    )


def _split_rows(rows: Iterable[RowSlice], values_TD: torch.Tensor) -> list[_Part]:
    parts: list[_Part] = []
    start = 0
    for part in rows:
        parts.append((part, values_TD[start : start + part.count]))
        start += part.count
    return parts


def _join(parts: Sequence[_Part], row: int, hidden_size: int) -> tuple[int, torch.Tensor]:
    """First position and values of a row's consecutive parts. Raises `NotAuditedError`."""
    own = sorted((part for part in parts if part[0].row == row), key=lambda part: part[0].position)
    if not own:
        return 0, torch.empty((0, hidden_size))
    end = first = own[0][0].position
    for part, _ in own:
        if part.position != end:
            raise NotAuditedError("its inputs are not all known")
        end += part.count
    return first, torch.cat([values_LD for _, values_LD in own])


def _add_parts(
    add: Callable[[int, int, bytes | memoryview, int], None],
    parts: Sequence[_Part],
    starts: Sequence[int],
) -> None:
    """Add what passed in this session: nothing before `starts[row]`."""
    for part, values_LD in sorted(parts, key=lambda each: (each[0].row, each[0].position)):
        skipped = min(max(starts[part.row] - part.position, 0), part.count)
        if skipped < part.count:
            _, values = tensors.encode(values_LD[skipped:].contiguous())
            count = part.count - skipped
            add(part.row, part.position + skipped, memoryview(values).cast("B"), count)
