"""What `simulate` is given: files, made-up worlds, and the nodes that join or are lost."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.routing.bottleneck import bottleneck
from nesa_node.routing.build import Request
from nesa_node.routing.exact import exact_latency
from nesa_node.routing.placement.moves import MoveCosts
from nesa_node.routing.placement.score import Goal
from nesa_node.routing.placement.what_if import (
    Answer,
    Newcomer,
    Question,
    Strategy,
    join,
    study,
    take_spans,
)
from nesa_node.topology.devices import LLAMA_70B, Block, Device, device
from nesa_node.topology.geography import CITIES
from nesa_node.topology.snapshot import NodeState, Snapshot
from nesa_node.topology.swarm_file import read_swarm
from nesa_node.topology.swarm_links import Place, round_trips_from
from nesa_node.topology.world_links import MBIT
from nesa_node.topology.worlds import make_world

STRATEGIES: Mapping[str, Strategy] = {
    "exact-latency": exact_latency,
    "bottleneck": lambda problem: bottleneck(problem).chain,
}
_HOME = (9.0, 40 * MBIT, 250 * MBIT)
_RACK = (0.6, 2000 * MBIT, 2000 * MBIT)
_ROUND_TRIP = re.compile(r"(\d{1,5}(?:\.\d{1,3})?) ?ms")
_WORLD_KEYS = {"regions": 8.0, "nodes": 30.0, "blocks": 80.0, "clients": 4.0, "homes": 0.7}


@dataclass(frozen=True, slots=True)
class Joined:
    """A node that joins, the words it was given by, and what it then held."""

    peer_id: PeerId
    words: str
    max_blocks: int
    span: Span


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was asked, of whom, and the answer."""

    name: str
    client: str
    question: Question
    joined: tuple[Joined, ...]
    lost: tuple[PeerId, ...]
    answer: Answer

    @property
    def change(self) -> bool:
        return bool(self.joined or self.lost)


@dataclass(frozen=True, slots=True)
class Scene:
    """A swarm to ask about. `client_rtt_ms_CN`: round trips of each client to the nodes."""

    name: str
    snapshot: Snapshot
    client: str
    client_rtt_ms_CN: np.ndarray
    block: Block
    quantization: str

    def ask(self, *, goal: Goal, replicas: int, strategy: Strategy) -> Question:
        costs = MoveCosts(
            block_bytes=self.block.weight_bytes(self.quantization),
            cache_bytes=float(self.block.cache_bytes),
        )
        return Question(
            requests=self._requests([]),
            goal=goal,
            replicas=replicas,
            strategy=strategy,
            costs=costs,
        )

    def _requests(self, more: Sequence[tuple[PeerId, float]]) -> list[Request]:
        peers = [node.peer_id for node in self.snapshot.nodes]
        rows = [
            dict(zip(peers, rtt_ms_N.tolist(), strict=True)) | dict(more)
            for rtt_ms_N in self.client_rtt_ms_CN
        ]
        return [
            Request(
                span=Span(0, self.snapshot.num_blocks),
                bytes_per_token=float(self.block.hidden_bytes),
                entry_rtt_ms=row,
            )
            for row in rows
        ]

    def changed_by(self, add: Sequence[str], remove: Sequence[str], asked: Question) -> Outcome:
        before = take_spans(self.snapshot, asked)
        lost = self._lost(remove)
        changed = before.without(*lost)
        newcomers = self._newcomers(add)
        to_client = [
            (newcomer.node.peer_id, float(np.median(newcomer.rtt_ms_N)))
            for newcomer, _ in newcomers
        ]
        asked = replace(asked, requests=self._requests(to_client))
        kept = [row for row, node in enumerate(before.nodes) if node.peer_id not in lost]
        changed = join(
            changed,
            (
                replace(newcomer, rtt_ms_N=[newcomer.rtt_ms_N[row] for row in kept])
                for newcomer, _ in newcomers
            ),
        )
        changed = take_spans(changed, asked)
        joined = []
        for newcomer, words in newcomers:
            node = changed.node(newcomer.node.peer_id)
            assert node is not None, "who joins is there"
            joined.append(Joined(node.peer_id, words, node.max_blocks, node.span))
        if not changed.nodes:
            raise ConfigError("--remove leaves no node at all; keep one")
        answer = study(before, changed, asked)
        return Outcome(self.name, self.client, asked, tuple(joined), lost, answer)

    def _lost(self, patterns: Sequence[str]) -> tuple[PeerId, ...]:
        peers = [node.peer_id for node in self.snapshot.nodes]
        lost: list[PeerId] = []
        for pattern in patterns:
            found = [peer for peer in peers if fnmatchcase(peer, pattern)]
            if not found:
                some = ", ".join(peers[:8]) + (", ..." if len(peers) > 8 else "")
                raise ConfigError(f"--remove {pattern}: no node is called that; there are {some}")
            lost += [peer for peer in found if peer not in lost]
        return tuple(lost)

    def _newcomers(self, words: Sequence[str]) -> list[tuple[Newcomer, str]]:
        taken = {node.peer_id for node in self.snapshot.nodes}
        newcomers = []
        for each in words:
            kind, rtt_ms_N, rate = self._parse(each)
            name = _free_name(kind.name, taken)
            taken.add(name)
            node = NodeState(
                name,
                Span(0, 0),
                quantization=self.quantization,
                decode_tokens_per_s=1.0 / kind.decode_block_s(self.block, self.quantization),
                prefill_tokens_per_s=kind.prefill_block_tokens_per_s(self.block),
                max_blocks=min(
                    kind.max_blocks(self.block, self.quantization), self.snapshot.num_blocks
                ),
            )
            newcomers.append((Newcomer(node, rtt_ms_N.tolist(), rate), each))
        return newcomers

    def _parse(self, words: str) -> tuple[Device, np.ndarray, float]:
        """The device, its round trips to all nodes, and the rate at which it sends."""
        name, at, place = words.partition("@")
        if not at or not place:
            raise ConfigError(
                f"--add {words}: give DEVICE@PLACE, such as rtx3090@40ms or a100@london"
            )
        try:
            kind = device(name)
        except ConfigError as error:
            raise ConfigError(f"--add {words}: {error}") from None
        access_ms, up, down = _HOME if kind.residential else _RACK
        count = len(self.snapshot.nodes)
        if match := _ROUND_TRIP.fullmatch(place.strip()):
            return kind, np.full(count, float(match[1])), up
        region = next((city for city in CITIES if city.name == place.strip().lower()), None)
        if region is None:
            names = ", ".join(city.name for city in CITIES)
            raise ConfigError(
                f"--add {words}: {place!r} is neither a round trip such as 40ms nor one of {names}"
            )
        here = Place(None, (region.latitude, region.longitude), access_ms, up, down)
        others = [Place(None, node.location, *_HOME) for node in self.snapshot.nodes]
        rtt_ms_N = round_trips_from(here, others)
        if np.isnan(rtt_ms_N).any():
            raise ConfigError(
                f"--add {words}: some nodes have no region or location; give a round trip instead, "
                f"{name}@40ms"
            )
        return kind, rtt_ms_N, up


def chosen_strategy(name: str) -> Strategy:
    """Raises `ConfigError` for a name that is none."""
    if name not in STRATEGIES:
        raise ConfigError(f"--strategy {name}: there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def read_file(path: Path) -> Scene:
    """Raises `ConfigError` if it cannot be read."""
    try:
        text = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--nodes {path}: {reason}; docs/simulate.md has an example") from None
    swarm = read_swarm(text, np.random.default_rng(0), where=str(path))
    peers = [node.peer_id for node in swarm.snapshot.nodes]
    if swarm.client_rtt_ms is not None:
        rtt_ms_N = np.array([swarm.client_rtt_ms[peer] for peer in peers])
        client = "as the file says"
    else:
        assert swarm.snapshot.links is not None, "a swarm that was written down has links"
        rtt_ms_NN = swarm.snapshot.links.of(peers).rtt_ms_NN
        nearest = int(np.nan_to_num(rtt_ms_NN, nan=1e6).sum(axis=1).argmin())
        rtt_ms_N = rtt_ms_NN[nearest]
        client = f"beside {peers[nearest]}, in the middle (the file names none)"
    return Scene(path.name, swarm.snapshot, client, rtt_ms_N[None], swarm.block, swarm.quantization)


def read_world(words: str, seed: int) -> Scene:
    """`regions=3,nodes=30`. Raises `ConfigError` for what is not one."""
    values = dict(_WORLD_KEYS)
    for part in filter(None, words.split(",")):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if key not in values or not equals:
            raise ConfigError(f"--world {part}: give KEY=NUMBER of {', '.join(_WORLD_KEYS)}")
        try:
            values[key] = float(text)
        except ValueError:
            raise ConfigError(f"--world {part}: {text!r} is no number") from None
    _check_world(values)
    made = make_world(
        int(values["nodes"]),
        int(values["blocks"]),
        np.random.default_rng(seed),
        num_regions=int(values["regions"]),
        num_clients=int(values["clients"]),
        residential_share=values["homes"],
    )
    regions = ", ".join(region.name for region in made.regions)
    return Scene(
        f"a world of {int(values['nodes'])} nodes in {regions}",
        made.snapshot,
        f"the mean of {made.num_clients}",
        made.client_rtt_ms_CN,
        LLAMA_70B,
        made.snapshot.nodes[0].quantization,
    )


def _check_world(values: Mapping[str, float]) -> None:
    limits = {
        "regions": len(CITIES),
        "nodes": 5000,
        "blocks": 1000,
        "clients": 64,
    }
    for key, most in limits.items():
        if not 1 <= values[key] <= most or values[key] % 1:
            raise ConfigError(f"--world {key}={values[key]:g}: a whole number from 1 to {most}")
    if not 0 <= values["homes"] <= 1:
        raise ConfigError(f"--world homes={values['homes']:g}: a share from 0 to 1")


def _free_name(name: str, taken: set[PeerId]) -> PeerId:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return PeerId(free)
