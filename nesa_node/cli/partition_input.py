"""Machines that `nesa-node plan` divides a network among, from flags or a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nesa_node.core.errors import ConfigError
from nesa_node.sharding.operation_graph import Machine

MAX_MACHINES = 1000


class MachineRow(BaseModel):
    """One table `[[machine]]` of a file of machines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


def read_machines(path: Path) -> list[Machine]:
    """The machines of a TOML file. Raises `ConfigError`."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--machines {path}: {error}") from error
    if document.keys() != {"machine"} or not isinstance(document["machine"], list):
        raise ConfigError(f"--machines {path}: expected tables [[machine]], and nothing else")
    return parse_machines(document["machine"], f"--machines {path}")


def parse_machines(tables: Sequence[object], where: str) -> list[Machine]:
    """The machines of `tables`, which have the fields of `MachineRow`. Raises `ConfigError`."""
    rows = []
    for number, table in enumerate(tables, start=1):
        try:
            rows.append(MachineRow.model_validate(table))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "it"
            raise ConfigError(f"{where}: machine {number}: {key}: {first['msg']}") from error
    machines = [row.machine() for row in rows for _ in range(row.count)]
    if len(machines) > MAX_MACHINES:
        raise ConfigError(f"{len(machines)} machines: at most {MAX_MACHINES}")
    return machines
