"""Notices about the pool: machines that serve no model of their own choice, and what they get.

An `Offer` says what a machine can do and allows, a `BuildRequest` which swarms its signer wants, a
`MachineAssignment` what an orchestrator asks one machine to hold, a `PoolStatus` what became of
requests. All but assignments have the topic `POOL` in place of a model id; an assignment has its
machine's peer id.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from nesa_node.core.ids import ModelId, PeerId, Span, is_model_name
from nesa_node.core.settings.choices import PlacementGoal, PoolQuantType, WeightQuality
from nesa_node.swarm.dht.adapter_notices import AdapterNotice
from nesa_node.swarm.dht.sealing import (
    STRICT,
    Addresses,
    Count,
    EvidenceNotice,
    FailureReport,
    Lease,
    Notice,
    Operator,
    Pair,
    Peer,
    PlacementNotice,
    StatementBounds,
    Text,
    Time,
    check_own_addresses,
    max_items,
)
from nesa_node.swarm.dht.training_notices import TrainingNotice
from nesa_node.topology.roofline import WeightFigures

POOL = ModelId("pool")
"""Topic of the notices that concern all machines of the pool."""
MAX_OFFERS = 1024
MAX_REQUESTS = 128
MAX_HELD_MODELS = 8
MAX_WANTED_SWARMS = 16
MAX_LISTED_SWARMS = 24
REQUEST_MAX_TTL_S = 30 * 86_400.0


def _check_model_name(name: str) -> str:
    if not is_model_name(name):
        raise ValueError("not the name of a model")
    return name


def _check_span(pair: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= pair[0] < pair[1] <= 10_000:
        raise ValueError(f"{pair} is no span")
    return pair


_SpanPair = Annotated[Pair, AfterValidator(_check_span)]
_ModelText = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_check_model_name)]
_Family = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
_Glob = Annotated[Text, Field(min_length=1, max_length=128)]
_Positive = Annotated[float, Field(gt=0, le=1e18)]
_Replicas = Annotated[int, Field(ge=1, le=100)]
_Reason = Annotated[Text, Field(max_length=240)]

HeldState = Literal["loading", "serving", "leaving", "failed", "refused"]
SwarmState = Literal["serving", "building", "refused", "removing"]


class MeasuredFigures(BaseModel):
    """`WeightFigures` as sent."""

    model_config = STRICT

    block_overhead_s: float = Field(ge=0, le=1e3)
    read_bytes_per_s: _Positive
    flop_per_s: _Positive
    overlaps: bool = False
    wakeup_s: float = Field(default=0.0, ge=0, le=1e3)

    def weight_figures(self) -> WeightFigures:
        return WeightFigures(**self.model_dump())


class HeldModel(BaseModel):
    """A model that a machine holds a span of, or was asked to. `node` serves it, once it does.

    `reason` says why a state is "refused" or "failed".
    """

    model_config = STRICT

    model: _ModelText
    state: HeldState
    span: _SpanPair
    quant_type: PoolQuantType = "none"
    model_id: Text = Field(default="", max_length=256)
    node: Peer | None = None
    reason: _Reason = ""

    @property
    def blocks(self) -> Span:
        return Span(*self.span)

    @property
    def takes_memory(self) -> bool:
        """Whether the machine has its blocks in memory, or loads them."""
        return self.state in ("loading", "serving", "leaving")


class Offer(Notice):
    """A machine without a model of its own: device, memory, what was measured, what is allowed.

    `memory_total_bytes` is what the operator allows for models, `memory_free_bytes` what of it is
    free on the device.
    `models` are glob patterns. `obeys` are the only orchestrators that may assign, `families` the
    only ones of models; all, if empty. `max_download_bytes` bounds one model's files from the hub.
    `away_reason` says why `models` are none for now.
    """

    bounds: ClassVar = StatementBounds("offer", 4096, 120.0, 0.0, MAX_OFFERS)

    device: Text = Field(max_length=64)
    device_type: Literal["cpu", "cuda", "mps"]
    device_count: int = Field(default=1, ge=1, le=64)
    cpu_threads: int = Field(default=1, ge=1, le=4096)
    memory_total_bytes: Count
    memory_free_bytes: Count
    disk_free_bytes: Count = 0
    figures: Annotated[dict[str, MeasuredFigures], max_items(8)] = Field(default_factory=dict)
    models: Annotated[tuple[_Glob, ...], max_items(16)] = ("*",)
    families: Annotated[tuple[_Family, ...], max_items(16)] = ()
    max_download_bytes: Count | None = None
    quant_types: Annotated[tuple[PoolQuantType, ...], max_items(3)] = ("none", "int8", "nf4")
    obeys: Annotated[tuple[Peer, ...], max_items(8)] = ()
    public_name: Annotated[Text, Field(max_length=64)] | None = None
    operator: Operator | None = None
    addresses: Addresses = ()
    held: Annotated[tuple[HeldModel, ...], max_items(MAX_HELD_MODELS)] = ()
    away_reason: Annotated[Text, Field(max_length=120)] = ""

    def allows(self, name: str, family: str = "", download_bytes: int = 0) -> bool:
        """Whether the operator allows a model; `download_bytes` are the fewest of one block.

        An empty `family` is not known, and allowed.
        """
        most = self.max_download_bytes
        return (
            any(fnmatchcase(name, pattern) for pattern in self.models)
            and (not self.families or not family or family in self.families)
            and (most is None or download_bytes <= most)
        )

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        check_own_addresses(self.addresses, self.peer_id)
        if self.memory_free_bytes > self.memory_total_bytes:
            raise ValueError("more memory is free than there is")
        return self


class AssignedSpan(BaseModel):
    """Blocks of a model to hold: `quant_type` and `dtype` of the weights, room of the KV cache."""

    model_config = STRICT

    model: _ModelText
    span: _SpanPair
    quant_type: PoolQuantType = "none"
    dtype: str = Field(default="auto", pattern=r"^[a-z0-9]{1,16}$")
    cache_tokens: int = Field(ge=1, le=2**31)

    @property
    def blocks(self) -> Span:
        return Span(*self.span)


class MachineAssignment(Notice):
    """All that the signer asks one machine, the topic, to hold; nothing: back to the pool."""

    bounds: ClassVar = StatementBounds("assignment", 4096, 3600.0, 0.0, 16)

    spans: Annotated[tuple[AssignedSpan, ...], max_items(MAX_HELD_MODELS)] = ()

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if len({span.model for span in self.spans}) < len(self.spans):
            raise ValueError("a model is assigned twice")
        return self


def assignment_topic(machine: PeerId) -> ModelId:
    return ModelId(machine)


class WantedSwarm(BaseModel):
    """A swarm that is asked for until `until`: at least `replicas` of each block, at most
    `max_replicas` where it is busy.

    `quality` is the floor of its weights' precision.
    """

    model_config = STRICT

    model: _ModelText
    replicas: _Replicas = 1
    max_replicas: _Replicas = 1
    quality: WeightQuality = "exact"
    goal: PlacementGoal = "latency"
    until: Time

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.max_replicas < self.replicas:
            raise ValueError("fewer replicas at most than at least")
        return self


class BuildRequest(Notice):
    """All swarms that its signer wants; one that is no longer listed is removed."""

    bounds: ClassVar = StatementBounds("request", 4096, REQUEST_MAX_TTL_S, 0.0, MAX_REQUESTS)

    swarms: Annotated[tuple[WantedSwarm, ...], max_items(MAX_WANTED_SWARMS)] = ()

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if len({swarm.model for swarm in self.swarms}) < len(self.swarms):
            raise ValueError("a model is asked for twice")
        return self


class SwarmStatus(BaseModel):
    """What became of a wanted swarm. `predicted_tokens_per_s` is that of its plan."""

    model_config = STRICT

    model: _ModelText
    state: SwarmState
    replicas: int = Field(ge=0, le=1000)
    wanted: int = Field(ge=0, le=1000)
    machines: int = Field(ge=0, le=10_000)
    model_id: Text = Field(default="", max_length=256)
    predicted_tokens_per_s: float = Field(default=0.0, ge=0, le=1e8)
    reason: _Reason = ""


class PoolStatus(Notice):
    """An orchestrator's view of the pool: machines, swarms, and the peers that may create any."""

    bounds: ClassVar = StatementBounds("status", 8192, 120.0, 0.0, 16)

    creators: Annotated[tuple[Peer, ...], max_items(16)] = ()
    machines: int = Field(default=0, ge=0, le=100_000)
    free_machines: int = Field(default=0, ge=0, le=100_000)
    swarms: Annotated[tuple[SwarmStatus, ...], max_items(MAX_LISTED_SWARMS)] = ()


NOTICE_KINDS: dict[str, type[Notice]] = {
    each.bounds.name: each
    for each in (
        Lease,
        PlacementNotice,
        FailureReport,
        Offer,
        MachineAssignment,
        BuildRequest,
        PoolStatus,
        AdapterNotice,
        TrainingNotice,
        EvidenceNotice,
    )
}
"""All kinds of notices, those of the modules beside this one too."""
