"""Machines of a pool as plans see them: from their offers, or from a file that describes them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId
from nesa_node.core.settings.choices import PoolQuantType
from nesa_node.core.settings.declaration import PublicName, read_limited
from nesa_node.routing.placement.building import HOP_OVERHEAD_S, HOP_S, ModelShape, PoolMachine
from nesa_node.swarm.dht.pool_notices import MAX_HELD_MODELS, AssignedSpan, HeldModel, Offer
from nesa_node.topology.roofline import WeightFigures
from nesa_node.topology.shape.failure_domains import declared_domains
from nesa_node.topology.simulation.devices import (
    COMPUTE_EFFICIENCY,
    LAUNCH_S,
    READ_EFFICIENCY,
    find_device,
)

Holding = AssignedSpan | HeldModel


def pool_machine(
    offer: Offer,
    name: str,
    shape: ModelShape,
    held: Mapping[str, Holding],
    shapes: Mapping[str, ModelShape],
    *,
    hop_s: float = HOP_S,
    slowdown: Callable[[str], float] = lambda kind: 1.0,
) -> PoolMachine | None:
    """The machine as a candidate for the model `name` of `shape`; None if it may not hold it.

    `held` and `shapes` are by a model's name: what the machine holds or is to hold, and the shapes
    that are known. `slowdown` of a kind of weights says how much slower than its figures the
    machine was seen to be.
    """
    shown = {each.model for each in offer.held}
    if name in held or name in shown or len(held) >= MAX_HELD_MODELS:
        return None
    if not offer.allows(name, shape.family, shape.least_download_bytes):
        return None
    figures = {
        kind: each.weight_figures().slowed(slowdown(kind)) for kind, each in offer.figures.items()
    }
    room, most = free_bytes(offer, held, shapes), offer.max_download_bytes
    domains = declared_domains(offer.addresses, offer.operator)
    return PoolMachine(offer.signer, room, figures, offer.quant_types, hop_s, most, domains)


def free_bytes(offer: Offer, held: Mapping[str, Holding], shapes: Mapping[str, ModelShape]) -> int:
    """What is allowed less all that is held, and what is free less what still loads.

    None is free where a model is held whose shape is not known. Spans that their model cannot have
    take nothing: offers are untrusted.
    """
    taken, loading = 0, 0
    serving = {each.model for each in offer.held if each.state == "serving"}
    for name, holding in held.items():
        shape = shapes.get(name)
        if shape is None:
            return 0
        if may_be_held(holding, shape):
            size = shape.held_bytes(holding.blocks, holding.quant_type)
            taken += size
            loading += 0 if name in serving else size
    return max(0, min(offer.memory_total_bytes - taken, offer.memory_free_bytes - loading))


def may_be_held(holding: Holding, shape: ModelShape) -> bool:
    """Whether a model of this shape has such blocks, and such weights."""
    return holding.blocks.end <= shape.num_blocks and holding.quant_type in shape.block_bytes


MAX_FILE_CHARS = 1_000_000
MAX_MACHINES = 1024
_KINDS = ("float32", "float16", "bfloat16", "int8", "nf4")
_Positive = Annotated[float, Field(gt=0, le=1e9)]


class DescribedMachine(BaseModel):
    """One `[[machine]]` of the file (`docs/pool.md` has an example).

    What is left out follows from `device`, one of `topology/simulation/devices.py`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: PublicName
    copies: int = Field(default=1, ge=1, le=MAX_MACHINES)
    device: str | None = None
    memory_gib: _Positive | None = None
    read_gb_per_s: _Positive | None = None
    tflop_per_s: _Positive | None = None
    block_overhead_ms: float = Field(default=1e3 * LAUNCH_S, ge=0, le=1e6)
    round_trip_ms: float = Field(default=1e3 * (HOP_S - HOP_OVERHEAD_S), ge=0, le=1e5)
    quant_types: Annotated[list[PoolQuantType], Field(min_length=1)] = ["none", "int8", "nf4"]
    operator: PublicName | None = None

    def pool_machines(self) -> dict[PeerId, PoolMachine]:
        """The machine and its copies, by name. Raises `ConfigError` for what is missing."""
        memory, read, flop = self._sizes()
        figures = WeightFigures(1e-3 * self.block_overhead_ms, read, flop)
        kinds = dict.fromkeys(_KINDS, figures)
        hop_s = HOP_OVERHEAD_S + 1e-3 * self.round_trip_ms
        copies = range(1, self.copies + 1)
        names = [self.name] if self.copies == 1 else [f"{self.name}-{index}" for index in copies]
        machine = PoolMachine(
            PeerId(self.name),
            memory,
            kinds,
            tuple(self.quant_types),
            hop_s,
            domains=declared_domains((), self.operator),
        )
        return {PeerId(name): replace(machine, peer=PeerId(name)) for name in names}

    def _sizes(self) -> tuple[int, float, float]:
        """Bytes of memory, bytes/s and FLOP/s."""
        memory = None if self.memory_gib is None else int(self.memory_gib * 2**30)
        read = None if self.read_gb_per_s is None else 1e9 * self.read_gb_per_s
        flop = None if self.tflop_per_s is None else 1e12 * self.tflop_per_s
        if self.device is not None:
            device = find_device(self.device)
            memory = device.memory_bytes if memory is None else memory
            read = READ_EFFICIENCY * device.read_bytes_per_s if read is None else read
            flop = COMPUTE_EFFICIENCY * device.flops if flop is None else flop
        if memory is None or read is None or flop is None:
            raise ConfigError("give device, or memory_gib, read_gb_per_s and tflop_per_s")
        return memory, read, flop


def read_pool_file(path: Path) -> tuple[dict[PeerId, PoolMachine], dict[PeerId, str]]:
    """Read the machines of a file, and their devices' names; peers are named by `name`.

    Raises `ConfigError` with a line that names the entry.
    """
    try:
        content = tomllib.loads(read_limited(path, MAX_FILE_CHARS))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    entries = content.get("machine")
    if content.keys() - {"machine"} or not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: it needs entries [[machine]], and nothing else")
    machines: dict[PeerId, PoolMachine] = {}
    devices: dict[PeerId, str] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{path}: machine {number}"
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            where += f" ({entry['name']!r:.66})"
        found, device = _read_entry(entry, where)
        if double := found.keys() & machines.keys():
            raise ConfigError(f"{where}: another machine is called {min(double)}")
        machines |= found
        devices |= dict.fromkeys(found, device)
        if len(machines) > MAX_MACHINES:
            raise ConfigError(f"{where}: more than {MAX_MACHINES} machines")
    return machines, devices


def _read_entry(entry: Any, where: str) -> tuple[Mapping[PeerId, PoolMachine], str]:
    try:
        described = DescribedMachine.model_validate(entry)
        return described.pool_machines(), described.device or ""
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        reason = f"{key}: {first['msg']}" if key else first["msg"]
        raise ConfigError(f"{where}: {reason}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
