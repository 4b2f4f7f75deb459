"""`nesa-node plan`: how a network of any kind would be divided among machines."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nesa_node.cli.flags import OUTPUT, JsonFlag
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.declaration import default_cache_dir, user_path
from nesa_node.core.wait_tracking import track_wait

if TYPE_CHECKING:
    from nesa_node.sharding.operation_graph import Machine

REQUEST_GROUP = Group("A request", sort_key=5)
MACHINES_GROUP = Group("Machines", sort_key=6)
SEARCH_GROUP = Group("Search", sort_key=7)
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
        from nesa_node.sharding.operation_graph import Machine

        return Machine(
            flop_per_s=1e12 * self.tflops,
            moved_bytes_per_s=1e9 * self.memory_gb_per_s,
            link_bytes_per_s=1e6 * self.link_mbit_per_s / 8,
            fast_memory_bytes=1e9 * self.fast_memory_gb,
            stream_bytes_per_s=1e9 * self.stream_gb_per_s,
        )


def plan(
    model: Annotated[
        str,
        Parameter(
            help="A folder with a config.json of transformers, or a model's name on the hub."
        ),
    ],
    /,
    *,
    nodes: Annotated[
        int, Parameter(group=MACHINES_GROUP, help="So many equal machines, of the rates below.")
    ] = 3,
    tflops: Annotated[
        float, Parameter(group=MACHINES_GROUP, help="Arithmetic of each, in 10^12 FLOP/s.")
    ] = 10.0,
    memory_gb_per_s: Annotated[
        float, Parameter(group=MACHINES_GROUP, help="Rate of its fast memory.")
    ] = 300.0,
    link_mbit_per_s: Annotated[
        float, Parameter(group=MACHINES_GROUP, help="Rate of its link, in each direction.")
    ] = 1000.0,
    fast_memory_gb: Annotated[
        float, Parameter(group=MACHINES_GROUP, help="Size of its fast memory; inf: enough.")
    ] = float("inf"),
    stream_gb_per_s: Annotated[
        float,
        Parameter(
            group=MACHINES_GROUP,
            help="Rate at which weights that do not fit are read again for each request.",
        ),
    ] = 2.0,
    machines: Annotated[
        Path | None,
        Parameter(
            group=MACHINES_GROUP,
            help="Unequal ones instead: a TOML file with tables [[machine]] of these keys (with _ "
            "for -) and count.",
        ),
    ] = None,
    batch: Annotated[int, Parameter(group=REQUEST_GROUP, help="Items of a request.")] = 1,
    tokens: Annotated[int, Parameter(group=REQUEST_GROUP, help="Tokens of each text.")] = 128,
    image_size: Annotated[
        int | None,
        Parameter(
            group=REQUEST_GROUP,
            help="Pixels of an image's sides. Without: what the config says, or 224.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Parameter(group=REQUEST_GROUP, help="Of weights and activations."),
    ] = "float32",
    seed: Annotated[int, Parameter(group=SEARCH_GROUP, help="Seed of the search.")] = 0,
    search_s: Annotated[
        float, Parameter(group=SEARCH_GROUP, help="Seconds to search for a better order.")
    ] = 10.0,
    svg: Annotated[
        Path | None, Parameter(group=OUTPUT, help="Draw the pieces, too: a file that ends in .svg.")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Show how MODEL would be cut into pieces, one for each of several machines.

    Any network of transformers that `torch.export` can trace: no weights are read, and no node is
    started or contacted.
    """
    for flag, value in (("--batch", batch), ("--tokens", tokens), ("--image-size", image_size)):
        if value is not None and not 1 <= value <= 1_000_000:
            raise ConfigError(f"{flag} {value}: a number from 1 to 1,000,000")
    if not 0 < search_s <= 3600:
        raise ConfigError(f"--search-s {search_s:g}: more than 0, at most 3600")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: a whole number from 0")
    if svg is not None and svg.suffix.lower() != ".svg":
        raise ConfigError(f"--svg {svg}: the name must end in .svg")
    if machines is None:
        rates = {
            "tflops": tflops,
            "memory_gb_per_s": memory_gb_per_s,
            "link_mbit_per_s": link_mbit_per_s,
            "fast_memory_gb": fast_memory_gb,
            "stream_gb_per_s": stream_gb_per_s,
        }
        rows = _parse_rows([{"count": nodes, **rates}], "--nodes and the flags of machines")
    else:
        rows = _read_machines(user_path(machines))
    every = [row.machine() for row in rows for _ in range(row.count)]
    if len(every) > MAX_MACHINES:
        raise ConfigError(f"{len(every)} machines: at most {MAX_MACHINES}")
    import torch

    from nesa_node.cli.views import partition as views
    from nesa_node.engine.graphs.model_graph import InputSizes, capture_model
    from nesa_node.engine.weights.hub import fetch_config
    from nesa_node.sharding.partition import find_partition

    if svg is not None:
        views.check_svg(svg)
    folder = fetch_config(model, cache_dir=default_cache_dir())
    sizes = InputSizes(batch, tokens, image_size)
    with track_wait("the model's graph to be captured"):
        captured = capture_model(folder, name=model, dtype=getattr(torch, dtype), sizes=sizes)
    with track_wait(f"a search of {search_s:g} s"):
        found = find_partition(captured.graph, every, seed=seed, budget_s=search_s)
    if as_json:
        views.print_json(captured.graph, found)
    else:
        views.print_partition(captured.graph, found, sys.stdout)
    if svg is not None:
        views.draw(found, svg)
    return 0


def _read_machines(path: Path) -> list[MachineRow]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--machines {path}: {error}") from error
    if document.keys() != {"machine"} or not isinstance(document["machine"], list):
        raise ConfigError(f"--machines {path}: expected tables [[machine]], and nothing else")
    return _parse_rows(document["machine"], f"--machines {path}")


def _parse_rows(tables: list[object], where: str) -> list[MachineRow]:
    rows = []
    for number, table in enumerate(tables, start=1):
        try:
            rows.append(MachineRow.model_validate(table))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "it"
            raise ConfigError(f"{where}: machine {number}: {key}: {first['msg']}") from error
    return rows
