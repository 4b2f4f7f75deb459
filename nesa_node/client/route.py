"""The hops of a session, and how they are made again when some of them are lost."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nesa_node.client.blame import Blame
from nesa_node.client.hop import OPEN_TIMEOUT_S, HopLink
from nesa_node.compression import tensors
from nesa_node.core.errors import (
    BusyError,
    ContextLengthError,
    MissingBlocksError,
    NesaError,
    PeerUnreachableError,
    RefusedError,
    RemoteError,
)
from nesa_node.core.ids import ModelId, PeerId, SessionId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.routing.avoidance import Avoidance
from nesa_node.routing.chains import Hop
from nesa_node.routing.repair import fill_gaps
from nesa_node.swarm.messages import PROTOCOL, VERSION, Downstream, Link, Mode, Open, Rollback
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.private import membership_proof
from nesa_node.swarm.stream import Stream
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

SUSPECT_S = 15.0
"""A peer that failed is tried again only after this, unless nobody else holds its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a session needs of its nodes."""

    model_id: ModelId
    span: Span
    rows: int
    max_tokens: int
    hidden_size: int
    dtype: str
    mode: Mode
    swarm_key: str | None = None
    num_blocks: int | None = None
    """Of the whole model. Where it is given, records that say otherwise count for nothing."""

    @property
    def tokens(self) -> int:
        return self.rows * self.max_tokens

    @property
    def max_output_bytes(self) -> int:
        return self.tokens * self.hidden_size * tensors.DTYPES[self.dtype].itemsize


class Route:
    """Links in the order of their blocks. `epoch` rises with every change of them.

    `rebuild` and `rollback` run one at a time; the session calls them.
    """

    def __init__(
        self,
        swarm: Swarm,
        request: RouteRequest,
        avoidance: Avoidance,
        on_change: Callable[[], None],
    ) -> None:
        self.links: list[HopLink] = []
        self.epoch = 0
        self.session = secrets.token_bytes(16)
        self.fresh: set[HopLink] = set()
        """The links of the last rebuild whose caches are empty: they need all that was sent."""
        self._secret = secrets.token_bytes(32)
        self._swarm = swarm
        self._request = request
        self._avoidance = avoidance
        self._on_change = on_change
        self._suspects: dict[PeerId, float] = {}
        self._unfit: dict[PeerId, RemoteError] = {}
        self.blame = Blame()

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(link.hop for link in self.links)

    @property
    def suspected(self) -> frozenset[PeerId]:
        """Who failed, or had no room, lately."""
        now = time.monotonic()
        return frozenset(peer for peer, until in self._suspects.items() if until > now)

    def suspect(self, peer: PeerId, reason: str) -> None:
        """Remember a failure of `peer`: it is avoided for a while, in later sessions too."""
        log.info("peer_failed", peer=peer, reason=reason)
        self._avoidance.failed(peer)
        self._suspects[peer] = time.monotonic() + SUSPECT_S

    async def rebuild(
        self,
        lengths: Sequence[int],
        *,
        drop: frozenset[PeerId] = frozenset(),
        needs_output: Callable[[Hop], bool] = lambda _: False,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        """Keep the links that live and are not in `drop`, open what is missing, link them all.

        Afterwards every kept node holds `lengths[row]` tokens and those in `fresh` hold none. A
        star's fresh hop sends its outputs again only where `needs_output(hop)`. What this attempt
        opened is closed again if it fails; the old links stay, though not linked to each other.
        Raises `MissingBlocksError`, `BusyError`, `ContextLengthError`, `RefusedError`,
        `PeerUnreachableError` and `RemoteError`.
        """
        for link in self.links:
            if link.lost is not None:
                self.suspect(link.hop.peer_id, link.lost)
        await self._discard([link for link in self.links if link.lost is not None])
        kept = [link for link in self.links if link.hop.peer_id not in drop]
        snapshot = await self._swarm.directory.fetch(
            self._request.model_id, self._request.num_blocks
        )
        hops = self._plan(snapshot, kept, drop)
        if not {link.hop for link in kept} <= set(hops):
            # Nobody can join what is left: begin again, with other nodes or other spans.
            await self.let_go()
            kept = []
        self.epoch += 1
        addresses = {node.peer_id: node.addresses for node in snapshot.nodes}
        known = {link.hop: link for link in kept}
        opened = await self._open_all(hops, known, addresses, open_timeout_s)
        links = [known.get(hop) or opened[hop] for hop in hops]
        try:
            await self._link_all(links, set(opened.values()), lengths, needs_output)
        except BaseException:
            await _close_all(list(opened.values()))
            raise
        dropped = [link for link in self.links if link not in links]
        self.links, self.fresh = links, set(opened.values())
        await _close_all(dropped)

    async def rollback(self, lengths: Sequence[int]) -> None:
        """Cut every node's cache. Raises `PeerUnreachableError` or `RemoteError`."""
        self.epoch += 1
        message = Rollback(epoch=self.epoch, lengths=tuple(lengths))
        await _all([link.rollback(message) for link in self.links])

    async def let_go(self) -> None:
        """Leave every node: the next rebuild begins anew, with whoever is there."""
        await self._discard(self.links)
        self.session, self._secret = secrets.token_bytes(16), secrets.token_bytes(32)

    async def close(self) -> None:
        await self._discard(self.links)

    def _plan(
        self, snapshot: Snapshot, kept: Sequence[HopLink], drop: frozenset[PeerId]
    ) -> tuple[Hop, ...]:
        """Hops that keep `kept`; if nobody fills the gaps so, hops that keep nothing."""
        tokens = self._request.tokens
        suspects = self.suspected
        small = {n.peer_id for n in snapshot.nodes if n.total_cache_tokens < tokens}
        barred = frozenset(self._unfit) | drop | small
        keep = tuple(link.hop for link in kept)
        first: MissingBlocksError | None = None
        # What a record says of free room is some seconds old: as a last resort it is not believed.
        for hops, free in ((keep, tokens), (keep, 0), ((), tokens), ((), 0)):
            for exclude in (barred | suspects, barred):
                try:
                    return fill_gaps(
                        snapshot,
                        self._request.span,
                        hops,
                        penalty=self._avoidance.penalty,
                        exclude=exclude,
                        min_free_tokens=free,
                    )
                except MissingBlocksError as error:
                    first = first or error
        assert first is not None
        raise self._why_missing(snapshot, first)

    def _why_missing(self, snapshot: Snapshot, error: MissingBlocksError) -> NesaError:
        """Nobody holds the blocks, or those who do have no room, or refused us."""
        request = self._request
        holders = [
            node
            for node in snapshot.nodes
            if any(node.span.start < end and start < node.span.end for start, end in error.missing)
        ]
        refusals = [self._unfit[n.peer_id] for n in holders if n.peer_id in self._unfit]
        fitting = [n for n in holders if n.peer_id not in self._unfit]
        if fitting and max(node.total_cache_tokens for node in fitting) < request.tokens:
            most = max(node.total_cache_tokens for node in fitting) // request.rows
            return ContextLengthError(
                f"a session of {request.max_tokens} tokens in {request.rows} rows was asked for; "
                f"the nodes with blocks {error.missing[0][0]}:{error.missing[0][1]} promise at "
                f"most {most} per row"
            )
        if refusals and not fitting:
            return RefusedError(refusals[0].code, str(refusals[0]))
        return error

    async def _open_all(
        self,
        hops: Sequence[Hop],
        known: dict[Hop, HopLink],
        addresses: dict[PeerId, tuple[str, ...]],
        timeout_s: float,
    ) -> dict[Hop, HopLink]:
        """Open the hops that are not known, all or none."""
        wanted = [(i, hop) for i, hop in enumerate(hops) if hop not in known]
        results = await asyncio.gather(
            *(
                self._open(hop, hops[i - 1] if i else None, addresses[hop.peer_id], timeout_s)
                for i, hop in wanted
            ),
            return_exceptions=True,
        )
        opened = {
            hop: result
            for (_, hop), result in zip(wanted, results, strict=True)
            if isinstance(result, HopLink)
        }
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await _close_all(list(opened.values()))
            raise failures[0]
        return opened

    async def _open(
        self, hop: Hop, before: Hop | None, addresses: tuple[str, ...], timeout_s: float
    ) -> HopLink:
        """Dialling and opening may each take `timeout_s`."""
        request, peer = self._request, hop.peer_id
        try:
            reader, writer = await self._swarm.transport.open_stream(
                peer, PROTOCOL, addresses, timeout_s
            )
        except PeerUnreachableError as error:
            self.suspect(peer, str(error))
            raise
        stream = Stream(peer, reader, writer)
        link = HopLink(hop, stream, request.max_output_bytes, self._on_change)
        try:
            await link.open(self._open_message(hop, before), timeout_s)
        except BaseException as error:
            await link.close()
            if isinstance(error, PeerUnreachableError):
                self.suspect(peer, str(error))
            elif isinstance(error, BusyError) or getattr(error, "code", "") == "draining":
                # Longer than it says: others go first, and without any it is asked again anyway.
                self._suspects[peer] = time.monotonic() + SUSPECT_S
            elif isinstance(error, RemoteError):
                self._unfit[peer] = error
            raise
        return link

    def _open_message(self, hop: Hop, before: Hop | None) -> Open:
        request = self._request
        chained = request.mode == "chain" and before is not None
        return Open(
            version=VERSION,
            model=request.model_id,
            session=self.session,
            secret=self._secret,
            blocks=(hop.span.start, hop.span.end),
            rows=request.rows,
            max_tokens=request.max_tokens,
            mode=request.mode,
            dtype=request.dtype,  # type: ignore[arg-type]  # checked by `tensors.DTYPES` before
            epoch=self.epoch - 1,
            upstream=before.peer_id if chained and before is not None else None,
            membership=membership_proof(
                request.swarm_key,
                SessionId(self.session),
                self._swarm.identity.peer_id,
                hop.peer_id,
            ),
        )

    async def _link_all(
        self,
        links: Sequence[HopLink],
        fresh: set[HopLink],
        lengths: Sequence[int],
        needs_output: Callable[[Hop], bool],
    ) -> None:
        zeros = (0,) * self._request.rows
        chained = self._request.mode == "chain"
        requests = []
        for i, link in enumerate(links):
            after = links[i + 1] if chained and i + 1 < len(links) else None
            if after is not None:
                lacks = zeros if after in fresh else tuple(lengths)
            else:
                again = not chained and link in fresh and needs_output(link.hop)
                lacks = zeros if again else tuple(lengths)
            message = Link(
                epoch=self.epoch,
                upstream=links[i - 1].hop.peer_id if chained and i else None,
                downstream=_downstream(after),
                lengths=zeros if link in fresh else tuple(lengths),
                emit_from=lacks,
            )
            requests.append(self._link(link, message, after))
        await _all(requests)

    async def _link(self, link: HopLink, message: Link, after: HopLink | None) -> None:
        try:
            await link.link(message)
        except PeerUnreachableError as error:
            self.suspect(link.hop.peer_id, str(error))
            raise
        except RemoteError as error:
            if error.code == "downstream_lost" and after is not None:
                self.blame.one_of_both(link, after, str(error))
                for either in (link, after):
                    if either.lost is not None:
                        self.suspect(either.hop.peer_id, either.lost)
            else:
                # It cannot be brought to where the others are.
                link.lose(str(error))
                self.suspect(link.hop.peer_id, str(error))
            raise

    async def _discard(self, links: Sequence[HopLink]) -> None:
        gone = list(links)
        self.links = [link for link in self.links if link not in gone]
        await _close_all(gone)


def _downstream(link: HopLink | None) -> Downstream | None:
    if link is None:
        return None
    return Downstream(peer=link.hop.peer_id, blocks=(link.hop.span.start, link.hop.span.end))


async def _close_all(links: Sequence[HopLink]) -> None:
    await asyncio.gather(*(link.close() for link in links))


async def _all(requests: Sequence[object]) -> None:
    """Wait for every request, then raise the first failure: none is left running."""
    results = await asyncio.gather(*requests, return_exceptions=True)  # type: ignore[call-overload]
    for result in results:
        if isinstance(result, BaseException):
            raise result
