"""Machines that `nesa-node plan` divides a network among, from flags or a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nesa_node.core.errors import ConfigError
from nesa_node.sharding.operation_graph import Floats, Machine

MAX_MACHINES = 1000

_Row = TypeVar("_Row", bound=BaseModel)


class MachineRow(BaseModel):
    """One table `[[machine]]` of a file of machines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    """Unique among the tables; of `count` machines the name of each."""
    count: int = Field(1, ge=1, le=MAX_MACHINES)
    tflops: float = Field(10.0, gt=0, allow_inf_nan=False)
    memory_gb_per_s: float = Field(300.0, gt=0, allow_inf_nan=False)
    link_mbit_per_s: float = Field(1000.0, gt=0, allow_inf_nan=False)
    fast_memory_gb: float = Field(float("inf"), ge=0)
    stream_gb_per_s: float = Field(2.0, gt=0, allow_inf_nan=False)

    def machine(self) -> Machine:
        return Machine(
            flop_per_s=1e12 * self.tflops,
            moved_bytes_per_s=1e9 * self.memory_gb_per_s,
            link_bytes_per_s=1e6 * self.link_mbit_per_s / 8,
            fast_memory_bytes=1e9 * self.fast_memory_gb,
            stream_bytes_per_s=1e9 * self.stream_gb_per_s,
        )


class LinkRow(BaseModel):
    """One table `[[link]]` of a file of machines: a rate between each two of some machines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    between: tuple[str, str]
    """Names of machines; the same one twice: each two of its machines."""
    mbit_per_s: float = Field(gt=0, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class PlannedMachines:
    """K machines with names, and rates between pairs of them."""

    machines: list[Machine]
    names: list[str]
    """Of each machine; empty for one without."""
    pair_rates_KK: Floats | None = None
    """[K, K] in bytes/s, infinite where only the machines' own links limit; None: everywhere."""


def read_machines(path: Path) -> PlannedMachines:
    """The machines of a TOML file. Raises `ConfigError`."""
    where = f"--machines {path}"
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from error
    tables, links = document.pop("machine", []), document.pop("link", [])
    if document or not tables or not isinstance(tables, list) or not isinstance(links, list):
        raise ConfigError(
            f"{where}: expected tables [[machine]], perhaps [[link]], and nothing else"
        )
    return parse_machines(tables, where, links)


def parse_machines(
    tables: Sequence[object], where: str, links: Sequence[object] = ()
) -> PlannedMachines:
    """The machines of `tables`, which have the fields of `MachineRow`, and rates of `links`, with
    those of `LinkRow`. Raises `ConfigError`.
    """
    rows = _parse_rows(MachineRow, tables, f"{where}: machine")
    for number, row in enumerate(rows, start=1):
        if row.name and row.name in (each.name for each in rows[: number - 1]):
            raise ConfigError(f"{where}: machine {number}: another one has the name {row.name!r}")
    names = [row.name for row in rows for _ in range(row.count)]
    if len(names) > MAX_MACHINES:
        raise ConfigError(f"{len(names)} machines: at most {MAX_MACHINES}")
    machines = [row.machine() for row in rows for _ in range(row.count)]
    rates_KK = _parse_links(links, where, names) if links else None
    return PlannedMachines(machines, names, rates_KK)


def _parse_links(tables: Sequence[object], where: str, names: Sequence[str]) -> Floats:
    """Rates between pairs of machines with these names [K, K]. Raises `ConfigError`."""
    rates_KK = np.full((len(names), len(names)), np.inf)
    for number, link in enumerate(_parse_rows(LinkRow, tables, f"{where}: link"), start=1):
        one, other = (
            [place for place, named in enumerate(names) if named and named == name]
            for name in link.between
        )
        pairs = [(i, j) for i in one for j in other if i != j]
        reason = ""
        if not one or not other:
            missing = link.between[1] if one else link.between[0]
            reason = f"no machine has the name {missing!r}"
        elif not pairs:
            reason = f"there is one machine {link.between[0]!r}"
        elif rates_KK[pairs[0]] < np.inf:
            reason = "a link before it has the same pair"
        if reason:
            raise ConfigError(f"{where}: link {number}: {reason}")
        for i, j in pairs:
            rates_KK[i, j] = rates_KK[j, i] = 1e6 * link.mbit_per_s / 8
    return rates_KK


def _parse_rows(kind: type[_Row], tables: Sequence[object], where: str) -> list[_Row]:
    rows = []
    for number, table in enumerate(tables, start=1):
        try:
            rows.append(kind.model_validate(table))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "it"
            message = first["msg"]
            if key.startswith("between"):
                key, message = "between", "two names of machines are expected"
            raise ConfigError(f"{where} {number}: {key}: {message}") from error
    return rows
