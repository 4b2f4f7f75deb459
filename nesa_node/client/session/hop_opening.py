"""Opening of a session at its nodes, with replacement of nodes that stay silent."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from nesa_node.client.recovery.failure_detector import ReplacementSearch
from nesa_node.client.routing.node_selection import NodeSelector
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.base import PrefixStart
from nesa_node.client.session.hop import HopLink
from nesa_node.compression.codecs import codec_names
from nesa_node.core.errors import BusyError, NoAddressError, PeerUnreachableError, RemoteError
from nesa_node.core.ids import PeerId, SessionId, Span
from nesa_node.core.logging import get_logger, session_name
from nesa_node.core.wait_tracking import track_wait
from nesa_node.routing.chains import Hop
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import membership_proof
from nesa_node.swarm.p2p.link_measurements import ping
from nesa_node.swarm.protocol.link_encoder import get_link_speed
from nesa_node.swarm.protocol.messages import PROTOCOL, VERSION, Open, Prefix
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

OPEN_SILENCE_S = 1.5
"""Seconds after which a node that has not answered is replaced, if another one answers."""
OPEN_POLL_S = 0.1
SIDE_PING_TIMEOUT_S = 10.0
"""Timeout of a ping on a separate stream; the link is lost before that
(`suspicion.MAX_SILENCE_S`)."""


class HopOpener:
    """Dials nodes and opens one session at them, under its ids there."""

    def __init__(
        self,
        swarm: Swarm,
        request: RouteRequest,
        selector: NodeSelector,
        prefix_start: PrefixStart,
        on_change: Callable[[], None],
    ) -> None:
        self.session = secrets.token_bytes(16)
        self.trace = b""
        """Trace context that nodes attach their spans to."""
        self.last_refusing_hop: Hop | None = None
        """The last hop that answered with a refusal."""
        self.unreached_spans: tuple[Span, ...] = ()
        """Spans of the nodes that the last attempt could not reach."""
        self._secret = secrets.token_bytes(32)
        self._swarm = swarm
        self._request = request
        self._selector = selector
        self._prefix_start = prefix_start
        self._on_change = on_change
        self.draws: Callable[[PeerId], bool] = lambda _: False
        """Whether a node that is opened is to be audited."""

    def renew_session_id(self) -> None:
        """Use new session ids from now on."""
        self.session, self._secret = secrets.token_bytes(16), secrets.token_bytes(32)

    async def open_hops(
        self,
        hops: Sequence[Hop],
        known: Mapping[Hop, HopLink],
        addresses: Mapping[PeerId, tuple[str, ...]],
        epoch: int,
        timeout_s: float,
        search: ReplacementSearch,
    ) -> dict[Hop, HopLink]:
        """Open all hops that are not in `known`, or none.

        Silent nodes are given up early if `search` finds replacements. Raises
        `PeerUnreachableError`, `BusyError` and `RemoteError`.
        """
        opening = {
            hop: asyncio.create_task(
                self.open_hop(hop, before, addresses[hop.peer_id], epoch, timeout_s)
            )
            for before, hop in zip([None, *hops], hops, strict=False)
            if hop not in known
        }
        try:
            silent = await self._wait_for_opens(hops, opening, search)
            ended = await asyncio.gather(*opening.values(), return_exceptions=True)
        except asyncio.CancelledError:
            # Links that opened before the cancellation took effect.
            for task in opening.values():
                task.cancel()
            ended = await asyncio.gather(*opening.values(), return_exceptions=True)
            await close_links([link for link in ended if isinstance(link, HopLink)])
            raise
        results = dict(zip(opening, ended, strict=True))
        opened = {hop: link for hop, link in results.items() if isinstance(link, HopLink)}
        self.unreached_spans = tuple(
            hop.span
            for hop, result in results.items()
            if isinstance(result, PeerUnreachableError | asyncio.CancelledError)
        )
        failures = [result for result in ended if isinstance(result, BaseException)]
        if failures:
            await close_links(list(opened.values()))
            if silent is not None:
                # The error that explains why the silent ones were cancelled.
                failures.insert(0, silent)
            # They refer to the raised error, and its traceback to this frame.
            del opening, ended, results, silent
            raise failures.pop(0)
        return opened

    async def _wait_for_opens(
        self,
        hops: Sequence[Hop],
        opening: Mapping[Hop, asyncio.Task[HopLink]],
        search: ReplacementSearch,
    ) -> PeerUnreachableError | None:
        """Wait until all attempts have ended; cancel silent ones that could be replaced."""
        if not opening:
            return None
        timeout_s, error = OPEN_SILENCE_S, None
        while True:
            _, waiting_for = await asyncio.wait(opening.values(), timeout=timeout_s)
            if not waiting_for:
                break
            silent = [hop for hop, task in opening.items() if task in waiting_for]
            search.start(tuple(hops), frozenset(hop.peer_id for hop in silent))
            if search.has_found:
                for hop in silent:
                    opening[hop].cancel()
                    what = f"{hop.peer_id} did not open the session, and replacements answered"
                    self._selector.record_failure(hop.peer_id, what)
                    error = PeerUnreachableError(what)
                search.exclude_unreachable()
                break
            timeout_s = OPEN_POLL_S
        search.stop()
        return error

    async def open_hop(
        self,
        hop: Hop,
        before: Hop | None,
        addresses: tuple[str, ...],
        epoch: int,
        timeout_s: float,
        *,
        donor: PeerId | None = None,
    ) -> HopLink:
        """Open the session at one node. Dialling and opening may each take `timeout_s`."""
        what, peer = "the node to open the session", hop.peer_id
        with track_wait(what, blocks=(hop.span,), peers=(peer,), limit_s=2 * timeout_s):
            link, secret = await self._dial(hop, addresses, timeout_s)
            try:
                message = self._open_message(link, secret, before, epoch, donor)
                await link.open(message, timeout_s)
                at_node = session_name(link.session)
                log.info("hop_opened", peer=peer, blocks=str(hop.span), at_node=at_node)
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    # Without a close message, which would wait for an answer.
                    link.abort()
                await link.close()
                if isinstance(error, PeerUnreachableError):
                    self._selector.record_failure(peer, str(error))
                elif isinstance(error, BusyError | RemoteError):
                    self._selector.record_refusal(peer, error)
                    self.last_refusing_hop = hop
                raise
            self._selector.record_accepted(peer, link)
            return link

    async def _dial(
        self, hop: Hop, addresses: tuple[str, ...], timeout_s: float
    ) -> tuple[HopLink, bytes]:
        """Link to a node, and the secret of the session there."""
        request, peer = self._request, hop.peer_id
        try:
            reader, writer = await self._swarm.transport.open_stream(
                peer, PROTOCOL, addresses, timeout_s
            )
        except PeerUnreachableError as error:
            self._selector.record_failure(
                peer, str(error), report=not isinstance(error, NoAddressError)
            )
            raise
        stream = Stream(peer, reader, writer)
        try:
            speed = await get_link_speed(self._swarm, peer, request.options.quality)
        except BaseException:
            await stream.close()
            raise
        session, secret = self._session_credentials()
        budget = self._swarm.message_budget
        asking = partial(
            ping, self._swarm.transport, peer, addresses, timeout_s=SIDE_PING_TIMEOUT_S, pings=1
        )
        link = HopLink(
            hop,
            stream,
            request,
            speed,
            self._on_change,
            session,
            secret,
            budget,
            asking,
            is_audited=self.draws(peer),
        )
        return link, secret

    def _session_credentials(self) -> tuple[bytes, bytes]:
        """Session id and secret for one node."""
        if self._request.is_chain:
            return self.session, self._secret
        # Different ones for each node, so that nodes cannot match them.
        return secrets.token_bytes(16), secrets.token_bytes(32)

    def _open_message(
        self,
        link: HopLink,
        secret: bytes,
        before: Hop | None,
        epoch: int,
        donor: PeerId | None,
    ) -> Open:
        request, hop = self._request, link.hop
        return Open(
            version=VERSION,
            model=request.model_id if request.find_name is None else request.find_name(hop.peer_id),
            session=link.session,
            secret=secret,
            blocks=(hop.span.start, hop.span.end),
            rows=request.rows,
            max_tokens=request.max_tokens,
            mode=request.options.routing,
            dtype=request.dtype,  # type: ignore[arg-type]  # checked by `tensors.DTYPES` before
            epoch=epoch - 1,
            upstream=before.peer_id if request.is_chain and before is not None else None,
            donor=donor,
            # A successor is handed the whole cache.
            prefix=link.prefix_for_node(self._prefix_start.prefix) if donor is None else (),
            quality=request.options.quality,
            codecs=codec_names(),
            adapter=request.adapter,
            trace=self.trace,
            membership=membership_proof(
                request.options.swarm_key,
                SessionId(link.session),
                self._swarm.identity.peer_id,
                hop.peer_id,
            ),
        )


async def close_links(links: Sequence[HopLink], prefix: Prefix = ()) -> None:
    """Close all links. If cancelled, abort them."""
    try:
        await asyncio.gather(*(link.close(prefix) for link in links))
    finally:
        for link in links:
            # A task that is cancelled before it starts runs nothing, not even `finally`.
            link.abort()
