"""Input of `nesa-node simulate`: swarm files, generated worlds, recorded snapshots.

Nodes may join or be lost. Recorded snapshots are replayed through the planner: the cost of sessions
on each, and the moves that it would make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from nesa_node.core.errors import ConfigError, MissingBlocksError
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chain_request import ChainRequest, build_problem
from nesa_node.routing.chains import ChainChooser, Hop, visits_to_hops
from nesa_node.routing.large_swarm import LargeSwarm, prepare_large_swarm
from nesa_node.routing.placement.large_plan import study_large_change
from nesa_node.routing.placement.moves import MoveCosts, RebalancePlan
from nesa_node.routing.placement.plan import (
    WhatIfResult,
    WhatIfSettings,
    assign_empty_nodes,
    measure_swarm,
    study_change,
)
from nesa_node.routing.placement.rebalance import rebalance, require_repeated_trigger
from nesa_node.routing.placement.score import Goal
from nesa_node.routing.search.pareto import Objectives, pareto_front
from nesa_node.routing.strategies import make_strategy
from nesa_node.server.orchestrator.snapshot_store import is_snapshot_store, read_snapshots
from nesa_node.topology.geography import CITIES, locations_array
from nesa_node.topology.links.sparse import estimate_sparse_links
from nesa_node.topology.simulation.devices import LLAMA_70B, Block
from nesa_node.topology.simulation.newcomer import add_newcomers, parse_newcomer
from nesa_node.topology.simulation.swarm_file import MAX_SWARM_FILE_BYTES, parse_swarm_file
from nesa_node.topology.simulation.world import make_large_world, make_world
from nesa_node.topology.snapshot import Snapshot
from nesa_node.topology.snapshot_json import MAX_SNAPSHOT_BYTES, snapshot_from_json


@dataclass(frozen=True, slots=True)
class ReplayedSnapshot:
    """Results for one snapshot, `at_s` after the first. `moves` are confirmed by two snapshots."""

    at_s: float
    nodes: int
    latency_s: float
    steps_per_s: float
    fewest_holders: int
    holes: tuple[Span, ...]
    moves: RebalancePlan


def replay_snapshots(
    path: Path, *, goal: Goal, replicas: int, strategy: ChainChooser
) -> list[ReplayedSnapshot]:
    """Plan for each snapshot as it was recorded; moves have no effect on the next one.

    The client is at the most central node of each. Raises `ConfigError` that names the line of a
    file that cannot be read.
    """
    rows: list[ReplayedSnapshot] = []
    earlier: RebalancePlan | None = None
    first_at = 0.0
    for snapshot in _read_snapshots(path):
        requests = [_make_central_request(snapshot)]
        question = WhatIfSettings(
            requests=requests, goal=goal, replicas=replicas, strategy=strategy
        )
        found = rebalance(
            snapshot,
            requests,
            goal=goal,
            replicas=replicas,
            policy=question.policy,
            costs=question.costs,
        )
        seen = measure_swarm(snapshot, question)
        first_at = first_at if rows else snapshot.taken_at
        rows.append(
            ReplayedSnapshot(
                at_s=snapshot.taken_at - first_at,
                nodes=len(snapshot.nodes),
                latency_s=seen.latency_s,
                steps_per_s=seen.steps_per_s,
                fewest_holders=min(seen.coverage),
                holes=snapshot.holes(),
                moves=require_repeated_trigger(earlier, found),
            )
        )
        earlier = found
    if not rows:
        raise ConfigError(f"--replay {path}: no snapshot in it; a line holds one JSON document")
    return rows


def _read_snapshots(path: Path) -> list[Snapshot]:
    """Read an orchestrator's snapshot store, or a file with one JSON document per line."""
    try:
        found = read_snapshots(path) if is_snapshot_store(path) else _read_json_lines(path)
    except OSError as error:
        raise ConfigError(f"--replay {path}: {error.strerror or error}") from None
    for at, snapshot in enumerate(found, 1):
        if snapshot.num_blocks < 1 or not snapshot.nodes:
            raise ConfigError(f"{path}, snapshot {at}: a snapshot without nodes or blocks")
    return found


def _read_json_lines(path: Path) -> list[Snapshot]:
    lines: list[bytes] = []
    left = MAX_SNAPSHOT_BYTES
    with path.open("rb") as file:
        while line := file.readline(left + 1):
            left -= len(line)
            if left < 0:
                raise ConfigError(
                    f"--replay {path} has more than {MAX_SNAPSHOT_BYTES} bytes; replay a part of it"
                )
            if line.strip():
                lines.append(line)
    return [
        snapshot_from_json(line, where=f"{path}, line {at}") for at, line in enumerate(lines, 1)
    ]


def _make_central_request(snapshot: Snapshot) -> ChainRequest:
    peers = [node.peer_id for node in snapshot.nodes]
    whole = Span(0, snapshot.num_blocks)
    if snapshot.links is None:
        return ChainRequest(span=whole)
    rtt_ms_NN = snapshot.links.select(peers).rtt_ms_NN
    nearest = int(np.nan_to_num(rtt_ms_NN, nan=1e4).sum(axis=1).argmin())
    known = zip(peers, rtt_ms_NN[nearest].tolist(), strict=True)
    return ChainRequest(span=whole, entry_rtt_ms={peer: ms for peer, ms in known if ms == ms})


_WORLD_DEFAULTS = {"regions": 8.0, "nodes": 30.0, "blocks": 80.0, "clients": 4.0, "homes": 0.7}
_WORLD_LIMITS = {"regions": len(CITIES), "nodes": 50_000, "blocks": 1000, "clients": 64}
MAX_DENSE_NODES = 5000
"""Nodes up to which a made-up swarm has the links of all pairs, and all of `simulate`'s options."""


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """Result of a simulation: the swarm's name, the client, the changes, the planners' answer.

    `joined` maps new nodes to the spans that they took.
    """

    name: str
    client: str
    question: WhatIfSettings
    joined: Mapping[PeerId, Span]
    lost: tuple[PeerId, ...]
    answer: WhatIfResult


@dataclass(frozen=True, slots=True)
class SwarmChange:
    """A swarm before and after nodes joined or were lost, and what is asked of it."""

    before: Snapshot
    after: Snapshot
    question: WhatIfSettings
    joined: tuple[PeerId, ...]
    lost: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class ParetoChain:
    """A chain that no other one beats in all objectives at once."""

    hops: tuple[Hop, ...]
    objectives: Objectives


@dataclass(frozen=True, slots=True)
class SimulatedSwarm:
    """A swarm to simulate. `client_rtt_ms_CN`: round-trip times of C clients to N nodes, ms.

    `prices`: per token and block; 1 for nodes without one.
    """

    name: str
    snapshot: Snapshot
    client: str
    client_rtt_ms_CN: np.ndarray
    block: Block
    quantization: str
    prices: Mapping[PeerId, float] = field(default_factory=dict)

    def make_question(self, *, goal: Goal, replicas: int, strategy: ChainChooser) -> WhatIfSettings:
        costs = MoveCosts(
            block_bytes=self.block.weight_bytes(self.quantization),
            cache_bytes=float(self.block.cache_bytes),
        )
        return WhatIfSettings(
            requests=self._requests(self.snapshot),
            goal=goal,
            replicas=replicas,
            strategy=strategy,
            costs=costs,
        )

    def _requests(self, joined_snapshot: Snapshot) -> list[ChainRequest]:
        """One request per client. A newcomer gets the round-trip times of its nearest node."""
        peers = [node.peer_id for node in joined_snapshot.nodes]
        old = len(self.snapshot.nodes)
        assert joined_snapshot.links is not None, "descriptions have links"
        rtt_ms_NN = joined_snapshot.links.select(peers).rtt_ms_NN
        like = [*range(old), *np.argmin(rtt_ms_NN[old:, :old], axis=1).tolist()]
        rows = [
            dict(zip(peers, rtt_ms_N[like].tolist(), strict=True))
            for rtt_ms_N in self.client_rtt_ms_CN
        ]
        return [
            ChainRequest(
                span=Span(0, self.snapshot.num_blocks),
                bytes_per_token=float(self.block.hidden_bytes),
                entry_rtt_ms=row,
            )
            for row in rows
        ]

    def apply_changes(
        self, add: Sequence[str], remove: Sequence[str], question: WhatIfSettings
    ) -> SimulationOutcome:
        change = self._change(add, remove, question)
        spans = {node.peer_id: node.span for node in change.after.nodes}
        answer = study_change(change.before, change.after, change.question)
        return SimulationOutcome(
            self.name,
            self.client,
            change.question,
            {peer: spans[peer] for peer in change.joined},
            change.lost,
            answer,
        )

    def find_pareto_chains(
        self, add: Sequence[str], remove: Sequence[str], question: WhatIfSettings, seed: int
    ) -> tuple[ParetoChain, ...]:
        """Of the first client, after the changes, the fastest first; none if a block has no holder.

        Raises `ConfigError` without pymoo.
        """
        change = self._change(add, remove, question)
        problem = build_problem(change.after, change.question.requests[0])
        price_N = np.array([self.prices.get(peer, 1.0) for peer in problem.peers])
        try:
            front = pareto_front(problem, price_N, seed=seed)
        except MissingBlocksError:
            return ()
        return tuple(
            ParetoChain(visits_to_hops(problem, point.chain), point.objectives) for point in front
        )

    def _change(
        self, add: Sequence[str], remove: Sequence[str], question: WhatIfSettings
    ) -> SwarmChange:
        before = assign_empty_nodes(self.snapshot, question)
        lost = match_peers([node.peer_id for node in self.snapshot.nodes], remove)
        joined, rng = before, np.random.default_rng(0)
        for words in add:
            try:
                newcomer = parse_newcomer(words)
            except ConfigError as error:
                raise ConfigError(f"--add: {error}") from None
            joined = add_newcomers(
                joined, newcomer, rng, block=self.block, quantization=self.quantization
            )
        names = [node.peer_id for node in joined.nodes[len(before.nodes) :]]
        question = replace(question, requests=self._requests(joined))
        changed = joined.without_peers(*lost)
        if not changed.nodes:
            raise ConfigError("--remove leaves no node at all; keep one, or --add another")
        changed = assign_empty_nodes(changed, question)
        return SwarmChange(before, changed, question, tuple(names), lost)


def match_peers(peers: Sequence[PeerId], patterns: Sequence[str]) -> tuple[PeerId, ...]:
    """The peers that match any of the patterns of --remove. Raises `ConfigError` for one without
    a match."""
    lost: dict[PeerId, None] = {}
    for pattern in patterns:
        found = [peer for peer in peers if fnmatchcase(peer, pattern)]
        if not found:
            some = ", ".join(peers[:8]) + (", ..." if len(peers) > 8 else "")
            raise ConfigError(f"--remove {pattern}: no node is called that; there are {some}")
        lost.update(dict.fromkeys(found))
    return tuple(lost)


@dataclass(frozen=True, slots=True)
class LargeSimulatedSwarm:
    """A made-up swarm of many thousand nodes, whose links are estimated from a few per node."""

    name: str
    client: str
    swarm: LargeSwarm
    requests: Sequence[ChainRequest]

    def make_question(self, *, goal: Goal, replicas: int, strategy: ChainChooser) -> WhatIfSettings:
        costs = MoveCosts(
            block_bytes=LLAMA_70B.weight_bytes(self.swarm.snapshot.nodes[0].quantization),
            cache_bytes=float(LLAMA_70B.cache_bytes),
        )
        return WhatIfSettings(
            requests=self.requests, goal=goal, replicas=replicas, strategy=strategy, costs=costs
        )

    def apply_changes(
        self, add: Sequence[str], remove: Sequence[str], question: WhatIfSettings
    ) -> SimulationOutcome:
        """As `SimulatedSwarm.apply_changes`; raises `ConfigError` for nodes that join."""
        if add:
            raise ConfigError(f"--add is for swarms of up to {MAX_DENSE_NODES} nodes")
        peers = self.swarm.links.peers
        lost = match_peers(peers, remove)
        kept = np.array([row for row, peer in enumerate(peers) if peer not in set(lost)])
        if not len(kept):
            raise ConfigError("--remove leaves no node at all; keep one")
        changed = self.swarm.without(kept, question.requests[0]) if lost else self.swarm
        asked = [replace(each, exclude=frozenset(lost)) for each in question.requests]
        answer = study_large_change(self.swarm, changed, replace(question, requests=asked))
        return SimulationOutcome(self.name, self.client, question, {}, lost, answer)


def load_strategy(name: str) -> ChainChooser:
    """Make the strategy called `name`. Raises `ConfigError` for an unknown name."""
    try:
        return make_strategy(name, np.random.default_rng(0)).choose
    except ConfigError as error:
        raise ConfigError(f"--strategy: {error}") from None


def read_swarm_file(path: Path) -> SimulatedSwarm:
    """Read a swarm's description. Raises `ConfigError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SWARM_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--nodes {path}: {reason}; docs/simulate.md has an example") from None
    swarm = parse_swarm_file(text, np.random.default_rng(0), where=str(path))
    peers = [node.peer_id for node in swarm.snapshot.nodes]
    if swarm.client_rtt_ms is not None:
        rtt_ms_N = np.array([swarm.client_rtt_ms[peer] for peer in peers])
        client = "as the file says"
    else:
        assert swarm.snapshot.links is not None, "a swarm that was written down has links"
        rtt_ms_NN = swarm.snapshot.links.select(peers).rtt_ms_NN
        nearest = int(np.nan_to_num(rtt_ms_NN, nan=1e6).sum(axis=1).argmin())
        rtt_ms_N = rtt_ms_NN[nearest]
        client = f"beside {peers[nearest]}, in the middle (the file names none)"
    return SimulatedSwarm(
        path.name,
        swarm.snapshot,
        client,
        rtt_ms_N[None],
        swarm.block,
        swarm.quantization,
        swarm.prices,
    )


def make_world_swarm(words: str, seed: int) -> SimulatedSwarm | LargeSimulatedSwarm:
    """Generate a swarm from `regions=3,nodes=30`. Raises `ConfigError` for malformed text."""
    values = dict(_WORLD_DEFAULTS)
    for part in filter(None, words.split(",")):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if key not in values or not equals:
            raise ConfigError(f"--world {part}: give KEY=NUMBER of {', '.join(_WORLD_DEFAULTS)}")
        try:
            values[key] = float(text)
        except ValueError:
            raise ConfigError(f"--world {part}: {text!r} is no number") from None
    for key, most in _WORLD_LIMITS.items():
        if not 1 <= values[key] <= most or values[key] % 1:
            raise ConfigError(f"--world {key}={values[key]:g}: a whole number from 1 to {most}")
    if not 0 <= values["homes"] <= 1:
        raise ConfigError(f"--world homes={values['homes']:g}: a share from 0 to 1")
    if values["nodes"] > MAX_DENSE_NODES:
        return _make_large_swarm(values, seed)
    made = make_world(
        int(values["nodes"]),
        int(values["blocks"]),
        np.random.default_rng(seed),
        num_regions=int(values["regions"]),
        num_clients=int(values["clients"]),
        residential_share=values["homes"],
    )
    regions = ", ".join(region.name for region in made.regions)
    return SimulatedSwarm(
        f"a world of {int(values['nodes'])} nodes in {regions}",
        made.snapshot,
        f"the mean of {made.num_clients}",
        made.client_rtt_ms_CN,
        LLAMA_70B,
        made.snapshot.nodes[0].quantization,
    )


def _make_large_swarm(values: Mapping[str, float], seed: int) -> LargeSimulatedSwarm:
    made = make_large_world(
        int(values["nodes"]),
        int(values["blocks"]),
        seed,
        num_regions=int(values["regions"]),
        num_clients=int(values["clients"]),
        residential_share=values["homes"],
    )
    nodes = made.snapshot.nodes
    links = estimate_sparse_links(
        [node.peer_id for node in nodes],
        locations_array([node.location for node in nodes]),
        made.measured,
        np.random.default_rng(seed),
    )
    whole = ChainRequest(
        span=Span(0, made.snapshot.num_blocks), bytes_per_token=float(LLAMA_70B.hidden_bytes)
    )
    requests = []
    for rtt_ms_N, rows in zip(made.client_rtt_ms_CN, made.client_pings_CA, strict=True):
        expected_N = links.expect_from(rows, rtt_ms_N[rows])
        by_peer = dict(zip(links.peers, expected_N.tolist(), strict=True))
        requests.append(replace(whole, entry_rtt_ms=by_peer))
    regions = ", ".join(region.name for region in made.regions)
    return LargeSimulatedSwarm(
        f"a world of {len(nodes)} nodes in {regions}",
        f"the mean of {made.num_clients}",
        prepare_large_swarm(made.snapshot, links, whole),
        requests,
    )
