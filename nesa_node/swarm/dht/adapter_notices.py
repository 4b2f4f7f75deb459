"""Notices about adapters: what their authors have published for a model.

The bytes lie with nodes of the model (`server/adapters/store.py`). An author has one notice per
model, so that its newest one adds, replaces and removes adapters.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, Field, model_validator

from nesa_node.swarm.dht.sealing import (
    STRICT,
    Notice,
    StatementBounds,
    Text,
    Time,
    max_items,
)

MAX_LISTED_ADAPTERS = 16
MAX_ADAPTER_BYTES = 256 * 2**20
"""Both files of one adapter."""
MAX_ADAPTER_RANK = 1024
MAX_TARGET_MODULES = 32
MAX_METRICS = 8
MAX_DESCRIPTION_CHARS = 200
ADAPTER_MAX_TTL_S = 30 * 86_400.0
"""An author need not be online to renew its notice. Nodes that hold one of its adapters announce
the notice again while it lives."""

ADAPTER_NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Such a name is also a safe name of a folder."""

_AdapterName = Annotated[str, Field(pattern=ADAPTER_NAME_PATTERN)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
_MetricName = Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,40}$")]
_Metric = Annotated[float, Field(ge=-1e9, le=1e9)]


class ListedAdapter(BaseModel):
    """A LoRA adapter, as its author describes it.

    `digest` is that of both files (`engine/weights/adapter_files.py`), `nbytes` their size.
    `rank` is the largest of its matrices, `target_modules` are the last parts of the names of the
    layers that it changes. Its author alone vouches for `metrics`.
    """

    model_config = STRICT

    name: _AdapterName
    digest: _Digest
    nbytes: int = Field(ge=1, le=MAX_ADAPTER_BYTES)
    rank: int = Field(ge=1, le=MAX_ADAPTER_RANK)
    target_modules: Annotated[
        tuple[_ModuleName, ...], max_items(MAX_TARGET_MODULES), Field(min_length=1)
    ]
    metrics: Annotated[dict[_MetricName, _Metric], max_items(MAX_METRICS)] = Field(
        default_factory=dict
    )
    created_at: Time
    description: Text = Field(default="", max_length=MAX_DESCRIPTION_CHARS)


class AdapterNotice(Notice):
    """All adapters of its signer for a model; one that is no longer listed is removed."""

    bounds: ClassVar = StatementBounds("adapter", 8192, ADAPTER_MAX_TTL_S, 0.0, 64)

    adapters: Annotated[tuple[ListedAdapter, ...], max_items(MAX_LISTED_ADAPTERS)] = ()

    def find_digest(self, digest: str) -> ListedAdapter | None:
        return next((each for each in self.adapters if each.digest == digest), None)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if len({each.name for each in self.adapters}) < len(self.adapters):
            raise ValueError("two adapters have one name")
        return self
