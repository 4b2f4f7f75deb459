"""Schema libraries as JSON, for files and for publication. All input is validated."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from nesa_node.core.errors import ConfigError
from nesa_node.routing.placement.recipes import Recipe
from nesa_node.routing.placement.schemas import Kind, Library

VERSION = 1
MAX_BYTES = 4 << 20

_Name = Annotated[str, Meta(min_length=1, max_length=64)]
_Few = Annotated[int, Meta(ge=0, le=64)]
_Number = Annotated[float, Meta(ge=-1e9, le=1e9)]
_Numbers = Annotated[list[_Number], Meta(max_length=256)]


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Schema(_Document):
    name: _Name
    pipelines: _Few
    searched: bool
    cut: Literal["quickest", "even"]
    order: Literal["memory", "speed", "near"]
    regions: Annotated[int, Meta(ge=1, le=64)]


class _Kind(_Document):
    centre: _Numbers
    schemas: Annotated[list[Annotated[int, Meta(ge=0, le=255)]], Meta(min_length=1, max_length=256)]
    snapshots: Annotated[int, Meta(ge=0, le=1 << 40)]


class _Library(_Document):
    version: int
    num_blocks: Annotated[int, Meta(ge=1, le=10_000)]
    goal: Literal["latency", "throughput"]
    schemas: Annotated[list[_Schema], Meta(min_length=1, max_length=256)]
    features: Annotated[list[_Name], Meta(min_length=1, max_length=256)]
    mean: _Numbers
    scale: _Numbers
    slope: Annotated[list[_Numbers], Meta(max_length=256)]
    intercept: _Numbers
    kinds: Annotated[list[_Kind], Meta(min_length=1, max_length=64)]


def to_json(library: Library) -> bytes:
    return msgspec.json.encode(
        _Library(
            version=VERSION,
            num_blocks=library.num_blocks,
            goal=library.goal,
            schemas=[
                _Schema(
                    schema.name,
                    schema.pipelines,
                    schema.searched,
                    schema.cut,
                    schema.order,
                    schema.regions,
                )
                for schema in library.schemas
            ],
            features=list(library.features),
            mean=library.mean_F.tolist(),
            scale=library.scale_F.tolist(),
            slope=library.slope_FS.tolist(),
            intercept=library.intercept_S.tolist(),
            kinds=[
                _Kind(kind.centre_F.tolist(), list(kind.schemas), kind.snapshots)
                for kind in library.kinds
            ],
        )
    )


def from_json(text: bytes | str, *, where: str = "schemas") -> Library:
    """Parse and validate the output of `to_json`; untrusted input is allowed.

    Raises `ConfigError`, which names `where`.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where} has {len(text)} bytes; at most {MAX_BYTES} are read")
    try:
        told = msgspec.json.decode(text, type=_Library)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if told.version != VERSION:
        raise ConfigError(f"{where} has version {told.version}, this program reads {VERSION}")
    sizes = (len(told.features), len(told.schemas))
    rows = [told.mean, told.scale, *(kind.centre for kind in told.kinds)]
    columns = [told.intercept, *told.slope]
    fits = (
        len(told.slope) == sizes[0]
        and all(len(row) == sizes[0] for row in rows)
        and all(len(column) == sizes[1] for column in columns)
        and all(schema < sizes[1] for kind in told.kinds for schema in kind.schemas)
        and all(scale > 0 and math.isfinite(scale) for scale in told.scale)
    )
    if not fits:
        raise ConfigError(f"{where}: its tables do not fit its {sizes[0]} features and schemas")
    return Library(
        num_blocks=told.num_blocks,
        goal=told.goal,
        schemas=tuple(
            Recipe(
                name=schema.name,
                pipelines=schema.pipelines,
                searched=schema.searched,
                cut=schema.cut,
                order=schema.order,
                regions=schema.regions,
            )
            for schema in told.schemas
        ),
        features=tuple(told.features),
        mean_F=np.array(told.mean, dtype=np.float64),
        scale_F=np.array(told.scale, dtype=np.float64),
        slope_FS=np.array(told.slope, dtype=np.float64).reshape(sizes),
        intercept_S=np.array(told.intercept, dtype=np.float64),
        kinds=tuple(
            Kind(np.array(kind.centre, dtype=np.float64), tuple(kind.schemas), kind.snapshots)
            for kind in told.kinds
        ),
    )
