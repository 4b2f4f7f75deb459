"""A client's connection to a swarm that serves a network in pieces.

In a chain nodes send each other what the next pieces need. In a star each piece's output comes to
this client, which sends it on: no node sees another. A request that fails in a chain runs again in
a star, which keeps what is computed and finds out which node is at fault.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from nesa_node.client.graphs.chain_run import run_chain
from nesa_node.client.graphs.chain_steps import find_steps
from nesa_node.client.graphs.decoder_sequence import DecoderSequence, SequenceLostError
from nesa_node.client.graphs.graph_link import GraphLink, open_graph_link
from nesa_node.client.routing.node_selection import NodeSelector
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import ConnectionOptions, RouteRequest
from nesa_node.client.session.connection import join_as_client
from nesa_node.core.errors import (
    BusyError,
    MissingBlocksError,
    ModelMismatchError,
    NesaError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.graphs.network import Network, open_plan_network
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.routing.chains import Hop
from nesa_node.sharding.graph_plan import GraphPlan, SpanInterface
from nesa_node.sharding.open_sizes import Sizes
from nesa_node.swarm.graph_plans import fetch_plan, find_plans
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.graph_messages import (
    ALIGNMENT,
    MAX_NODES,
    MAX_RUNNING,
    Exchange,
    GraphSequence,
)

log = get_logger(__name__)

CHAIN_FRESH_S = 10.0
"""Seconds for which requests use the nodes that were chosen for an earlier one."""
STAR_AFTER_FAILURE_S = 30.0
"""Seconds for which requests go in a star after one failed in a chain; twice as long after each
further one."""
RETRY_PAUSE_S = 0.3
MAX_NOT_COMPUTED = 2
"""So many nodes may fail to compute a request before it fails: the first may be at fault."""
FATAL_CODES = frozenset({"too_large"})
TEMPORARY_CODES = frozenset({"draining", "wrong_blocks"})


@dataclass(slots=True)
class _Progress:
    """A request on its way."""

    sizes: Sizes
    values: dict[int, Tensor]
    """What is computed so far and still needed."""
    pieces: list[int]
    """Those that are still to run, in order."""
    sequence: GraphSequence | None
    is_step: bool
    """Whether nodes keep what the request goes on from."""
    hops: tuple[Hop, ...] = ()
    """These nodes; none: those that are best now."""
    num_not_computed: int = 0
    deadline: float = field(default_factory=time.monotonic)


class GraphConnection:
    """Runs requests through the pieces of one plan. All share what they learn about nodes."""

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        network: Network,
        plan: GraphPlan,
        options: ConnectionOptions,
    ) -> None:
        """The caller closes it."""
        self.network = network
        self.plan = plan
        self._swarm = swarm
        self._model_id = model_id
        self._options = options
        count = len(plan.pieces)
        swarm.directory.set_num_blocks(model_id, count)
        self._request = RouteRequest(
            model_id=model_id,
            span=Span(0, count),
            rows=1,
            max_tokens=1,
            hidden_size=self._mean_boundary_values(),
            dtype=plan.dtype,
            options=options,
            num_blocks=count,
        )
        self._planner = ChainPlanner(swarm, options.strategy)
        self._selector = NodeSelector(swarm, self._request, self._planner)
        self._hops: tuple[Hop, ...] = ()
        self._addresses: Mapping[PeerId, tuple[str, ...]] = {}
        self._planned_at = 0.0
        self._planning = asyncio.Lock()
        self._star_until = 0.0
        self._num_chains_failed = 0
        """In a row."""
        self._chain_turns = asyncio.Semaphore(MAX_RUNNING)
        """Nodes read no more requests of one client at once. With more, two nodes might each wait
        for values of a request that the other one has not read."""
        self._links: dict[PeerId, asyncio.Future[GraphLink]] = {}
        self._link_locks: dict[PeerId, asyncio.Lock] = {}
        self._tasks = TaskSet()
        self._interfaces: dict[tuple[Span, bool], SpanInterface] = {}
        self._place = {
            operation: piece
            for piece, operations in enumerate(plan.pieces)
            for operation in operations
        }
        """The piece of each operation."""
        self._last_use = self._find_last_uses()

    @property
    def is_lost(self) -> bool:
        return self._swarm.transport.daemon_exited.is_set()

    async def close(self) -> None:
        """End all streams."""
        await self._tasks.close()
        await self._planner.close()

    async def run(
        self,
        inputs: Mapping[str, Tensor],
        sequence: DecoderSequence | None = None,
        part: str | None = None,
    ) -> dict[int, Tensor]:
        """The network's output values for these inputs; of a pipeline, those of one part.

        Of a `sequence` the tokens from its position on. Its first request gives it what does not
        depend on tokens; those after it run only the pieces that do, and give only such outputs.

        Raises `UnsupportedFeatureError` for inputs that the network was not captured for,
        `MissingBlocksError` where pieces have no node, `BusyError`, `RemoteError` for what no node
        computes, and `SequenceLostError` for a sequence that has to begin again.
        """
        position = 0 if sequence is None else sequence.position
        values, sizes = self.network.bind(inputs, part, position)
        outputs = self.network.outputs(part)
        fixed: frozenset[int] = frozenset()
        if sequence is not None:
            fixed = self.network.fixed_values
            values |= sequence.values
        if position:
            values = {index: values[index] for index in values.keys() - fixed}
            outputs = tuple(index for index in outputs if index not in fixed)
        progress = _Progress(
            sizes,
            values,
            self._find_pieces(values, outputs, is_step=position > 0),
            None if sequence is None else sequence.message,
            is_step=position > 0,
            hops=sequence.hops if sequence is not None and position else (),
        )
        self._extend(progress)
        if sequence is None or sequence.values or position:
            found = await self._try_chain(progress, outputs)
            if found is not None:
                progress.values, progress.pieces = found, []
        while progress.pieces:
            made = await self._advance(progress)
            if sequence is not None:
                sequence.values |= {index: made[index] for index in made.keys() & fixed}
        if sequence is not None and not position:
            sequence.hops = self._hops
        return {index: progress.values[index] for index in outputs}

    async def _try_chain(
        self, progress: _Progress, outputs: Sequence[int]
    ) -> dict[int, Tensor] | None:
        """The request's outputs, computed in a chain; None where there is none or it failed."""
        if self._options.routing != "chain" or time.monotonic() < self._star_until:
            return None
        try:
            hops = progress.hops or await self._plan_hops()
        except MissingBlocksError:
            return None  # a star waits for the missing nodes
        unknown = [index for index in outputs if index not in progress.values]
        find_interface = partial(self._find_interface, is_step=progress.is_step)
        steps = find_steps(hops, progress.pieces, find_interface, progress.values, unknown)
        if not steps or len(steps) > MAX_NODES:
            return None
        async with self._chain_turns:
            try:
                ask = partial(self._ask, sizes=progress.sizes, sequence=progress.sequence)
                made = await run_chain(steps, self._find_link, ask, progress.values)
            except (PeerUnreachableError, ProtocolError) as error:
                _check_sequence(progress, error)
                self._num_chains_failed += 1
                pause_s = STAR_AFTER_FAILURE_S * 2 ** min(self._num_chains_failed - 1, 6)
                self._star_until = time.monotonic() + pause_s
                log.info("chain_failed", reason=str(error), star_for_s=pause_s)
                if progress.is_step:
                    raise SequenceLostError(str(error)) from error  # some nodes went on, some not
                self._extend(progress)
                return None
        self._num_chains_failed = 0
        progress.values |= made
        return {index: progress.values[index] for index in outputs}

    def _find_pieces(
        self, known: Mapping[int, Tensor], outputs: Iterable[int], *, is_step: bool
    ) -> list[int]:
        """The pieces that a request needs where some values are known, in order."""
        needed: set[int] = set()
        wanted = [index for index in outputs if index not in known]
        while wanted:
            producer = self.network.captured.graph.values[wanted.pop()].producer
            assert producer is not None  # else it is an input, which is known
            piece = self._place[producer]
            if piece not in needed:
                needed.add(piece)
                span = Span(piece, piece + 1)
                received = self._find_interface(span, is_step=is_step).received
                wanted += [index for index in received if index not in known]
        return sorted(needed)

    def _extend(self, progress: _Progress) -> None:
        progress.deadline = time.monotonic() + self._options.recovery_timeout_s

    async def _advance(self, progress: _Progress) -> dict[int, Tensor]:
        """Run the request through its next node, or note why that failed; what it gave."""
        hop = await self._next_hop(progress)
        start = end = progress.pieces[0]
        while end < hop.span.end and end in progress.pieces:
            end += 1
        span = Span(start, end)
        try:
            link = await self._find_link(hop.peer_id)
            made = await self._run_at(link, span, progress)
        except (PeerUnreachableError, ProtocolError) as error:
            _check_sequence(progress, error)
            await self._note_failure(hop.peer_id, error, progress)
            if progress.is_step:
                raise SequenceLostError(str(error)) from error
            return {}
        self._extend(progress)
        progress.values |= made
        del progress.pieces[: len(span)]
        for index in [each for each in progress.values if self._last_use[each] < span.end]:
            del progress.values[index]
        return made

    async def _run_at(self, link: GraphLink, span: Span, progress: _Progress) -> dict[int, Tensor]:
        interface = self._find_interface(span, is_step=progress.is_step)
        given = {index: progress.values[index] for index in interface.received}
        return await self._ask(
            link, span, given, interface.sent, sizes=progress.sizes, sequence=progress.sequence
        )

    async def _ask(
        self,
        link: GraphLink,
        span: Span,
        given: Mapping[int, Tensor],
        wanted: Iterable[int],
        *,
        sizes: Sizes,
        sequence: GraphSequence | None,
        exchange: Exchange | None = None,
        sent: asyncio.Event | None = None,
    ) -> dict[int, Tensor]:
        shapes = {index: self.network.find_shape(index, sizes) for index in wanted}
        most = sum(shape.nbytes + ALIGNMENT for shape in shapes.values())
        made = await link.run(span, sizes, given, most, exchange, sent, sequence)
        for index, shape in shapes.items():
            found = made.get(index)
            if found is None or (found.dtype, tuple(found.shape)) != (shape.dtype, shape.shape):
                raise ProtocolError(
                    "bad_tensor", f"{link.peer} sent other values than pieces {span} give"
                )
        return {index: made[index] for index in shapes}

    async def _note_failure(
        self, peer: PeerId, error: PeerUnreachableError | ProtocolError, progress: _Progress
    ) -> None:
        """Choose other nodes after a failure. Raises `error` where there is no use in it."""
        code = error.code if isinstance(error, ProtocolError) else ""
        if code in FATAL_CODES:
            raise error
        if code == "not_computed":
            progress.num_not_computed += 1
            if progress.num_not_computed >= MAX_NOT_COMPUTED or len(self._addresses) == 1:
                raise error
        if isinstance(error, BusyError | RemoteError):
            if code in TEMPORARY_CODES or isinstance(error, BusyError):
                self._selector.record_refusal(peer, error)
            else:
                self._selector.exclude_for_a_while([peer])
        else:
            self._selector.record_failure(peer, str(error))
        self._hops = ()
        if time.monotonic() >= progress.deadline:
            raise error
        log.info("request_retried", peer=peer, reason=str(error), position=progress.pieces[0])
        if isinstance(error, BusyError):
            await asyncio.sleep(min(max(error.retry_after_s, RETRY_PAUSE_S), 5.0))

    async def _next_hop(self, progress: _Progress) -> Hop:
        """The node for the next piece. Waits for one until the request's deadline."""
        piece = progress.pieces[0]
        while True:
            try:
                for hop in progress.hops or await self._plan_hops():
                    if hop.span.start <= piece < hop.span.end:
                        return hop
                raise MissingBlocksError(((piece, piece + 1),), f"no node serves piece {piece}")
            except MissingBlocksError:
                if time.monotonic() >= progress.deadline:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _plan_hops(self) -> tuple[Hop, ...]:
        async with self._planning:
            fresh = time.monotonic() - self._planned_at < CHAIN_FRESH_S
            if not self._hops or not fresh:
                self._hops, self._addresses = await self._selector.plan_hops(
                    (), frozenset(), may_ping=not self._hops
                )
                self._planned_at = time.monotonic()
            return self._hops

    async def _find_link(self, peer: PeerId) -> GraphLink:
        async with self._link_locks.setdefault(peer, asyncio.Lock()):
            opening = self._links.get(peer)
            if opening is None or _has_failed(opening):
                opening = asyncio.get_running_loop().create_future()
                self._links[peer] = opening
                self._tasks.start(self._hold_link(peer, opening), name="graph-link")
            link = await asyncio.shield(opening)
            if link.is_leaving:
                raise RemoteError("draining", f"{peer} is leaving")
            return link

    async def _hold_link(self, peer: PeerId, ready: asyncio.Future[GraphLink]) -> None:
        addresses = self._addresses.get(peer, ())
        try:
            async with open_graph_link(self._swarm, self._model_id, peer, addresses) as link:
                ready.set_result(link)
                await link.serve()
        except NesaError as error:
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # is seen, also where no request waits any more

    def _find_interface(self, span: Span, *, is_step: bool = False) -> SpanInterface:
        key = span, is_step
        if key not in self._interfaces:
            network = self.network
            find = network.find_step_interface if is_step else network.find_interface
            self._interfaces[key] = find(self.plan.operations(span))
        return self._interfaces[key]

    def _find_last_uses(self) -> list[int]:
        """For each value the last piece that uses it; beyond all for what the network returns."""
        return [
            len(self.plan.pieces)
            if value.is_output
            else max((self._place[each] for each in value.consumers), default=-1)
            for value in self.network.captured.graph.values
        ]

    def _mean_boundary_values(self) -> int:
        """Numbers that pass between two pieces, in the mean, for a request as captured."""
        graph, count = self.network.captured.graph, len(self.plan.pieces)
        total = sum(
            graph.values[index].size_bytes
            for piece in self.plan.pieces
            for index in self.network.find_interface(piece).sent
        )
        return max(int(total / count / self.network.dtype.itemsize), 1)


def _check_sequence(progress: _Progress, error: NesaError) -> None:
    """Raise `SequenceLostError` where a node has forgotten what a request goes on from."""
    if progress.is_step and isinstance(error, ProtocolError) and error.code == "unknown_sequence":
        raise SequenceLostError(str(error)) from error


def _has_failed(opening: asyncio.Future[GraphLink]) -> bool:
    if not opening.done():
        return False
    return opening.exception() is not None or opening.result().failure is not None


@asynccontextmanager
async def open_graph_connection(
    checkpoint: Checkpoint, options: ConnectionOptions
) -> AsyncIterator[GraphConnection]:
    """Join the swarm that serves a network's weights in pieces, by the plan of most nodes.

    Raises the `SwarmError`s of `open_swarm`, `ConfigError` without initial peers,
    `MissingBlocksError` where no node serves it, and what capturing the network raises.
    """
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(join_as_client(options))
        model_id, plan, network = await _find_network(swarm, checkpoint, options)
        connection = GraphConnection(swarm, model_id, network, plan, options)
        stack.push_async_callback(connection.close)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(swarm.transport.wait_until_lost())
            yield connection
            watching.cancel()


async def _find_network(
    swarm: Swarm, checkpoint: Checkpoint, options: ConnectionOptions
) -> tuple[ModelId, GraphPlan, Network]:
    base = await asyncio.to_thread(compute_model_id, checkpoint)
    deadline = time.monotonic() + options.recovery_timeout_s
    with track_wait(f"nodes that serve {checkpoint.name} in pieces"):
        while not (found := await find_plans(swarm, base)):
            if time.monotonic() >= deadline:
                raise await _explain_missing(swarm, base)
            await asyncio.sleep(1.0)
    reason: NesaError | None = None
    for planned in found:
        try:
            plan = await fetch_plan(swarm, planned, random.Random())
            network = await asyncio.to_thread(open_plan_network, checkpoint, plan)
            return planned.model_id, plan, network
        except NesaError as error:
            log.info("plan_not_used", model=planned.model_id, reason=str(error))
            reason = error
    assert reason is not None
    raise reason


async def _explain_missing(swarm: Swarm, base: ModelId) -> NesaError:
    served = sorted({record.model_id for record in await swarm.directory.fetch_all()})
    name = base.partition("@")[0]
    if copies := [each for each in served if each.partition("@")[0] == name]:
        return ModelMismatchError(
            f"the swarm serves {', '.join(copies[:4])}, and the copy here differs ({base}): use "
            "the files that the nodes have, or start nodes with this copy"
        )
    shown = ", ".join(served[:4]) or "no model"
    return ModelMismatchError(
        f"no node serves {name} in pieces; the swarm serves {shown}. Start one: "
        f"nesa-node run {name} --initial-peers ADDRESS"
    )
