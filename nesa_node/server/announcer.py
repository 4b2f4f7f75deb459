"""Publisher of this node's record on the DHT."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from nesa_node.compression.quality import codec_names
from nesa_node.core.choices import QuantType
from nesa_node.core.errors import SwarmError
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.engine.measure import Throughput
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.messages import VERSION
from nesa_node.swarm.records import NodeStatus
from nesa_node.topology.packed import Measured, pack_measured, unpack_measured

log = get_logger(__name__)

State = Literal["joining", "serving", "draining"]
NEWS_S = 10.0
"""Interval at which the record is compared with the node's state: bounds the age of free cache,
load and other planning inputs, besides the DHT's own delay. An unchanged record is only renewed
before it expires."""
RENEW_S = 20.0
_NO_NEWS = {"uptime_s", "cpu_memory_free_bytes", "gpu_memory_free_bytes", "load", "measured"}
"""Fields that differ each time and are not compared; `load` and links are compared with less
precision."""
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts that do not change while the node runs."""

    model_id: str
    model_name: str
    num_blocks: int
    context_length: int
    dtype: torch.dtype
    quant_type: QuantType
    device: torch.device
    public_name: str | None
    max_blocks: int
    location: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Figures that change with every session."""

    total_tokens: int = 0
    free_tokens: int = 0
    load: float = 0.0
    sessions: int = 0
    tokens: int = 0
    """Tokens computed since the daemon started."""


class Announcer:
    """Publishes on request and, in `run`, well before each record would expire."""

    def __init__(
        self,
        directory: Directory,
        facts: NodeFacts,
        sent_bytes: Counter[str] | None = None,
        measured: Callable[[], Sequence[Measured]] = tuple,
    ) -> None:
        """`sent_bytes` counts bytes of hidden states by codec. It and `measured` are read for every
        record.
        """
        self.throughput = Throughput(0.0, 0.0)
        self.capacity: Callable[[], Capacity] = Capacity
        self.movable: Callable[[], bool] = bool
        self._sent_bytes = Counter() if sent_bytes is None else sent_bytes
        self._measured = measured
        self._directory = directory
        self._facts = facts
        self._started_at = time.monotonic()
        self._state: State = "joining"
        self._span: Span | None = None
        self._next_span: Span | None = None
        self._told: object = None
        self._told_at = -math.inf

    @property
    def state(self) -> State:
        """The announced state."""
        return self._state

    async def announce(self, state: State, span: Span, *, next_span: Span | None = None) -> None:
        """Publish this state now and in later renewals. `next_span` is the span to which the node
        moves.

        When the process has no file descriptors left, `run` publishes it later.
        """
        self._state, self._span, self._next_span = state, span, next_span
        try:
            await self._publish(self._status(state, span))
        except OSError as error:
            log.warning("record_not_published", reason=str(error))

    async def run(self) -> None:
        """Publish whenever due until cancelled; errors are logged."""
        pause_s = min(NEWS_S, renew_after_s(self._directory.ttl_s))
        while True:
            await asyncio.sleep(pause_s)
            if self._span is not None:
                try:
                    status = self._status(self._state, self._span)
                    if self._is_due(status, pause_s):
                        await self._publish(status)
                except (SwarmError, OSError) as error:
                    # Such as running out of file descriptors.
                    log.warning("record_not_published", reason=str(error))
                except Exception:  # a bug: a node that no longer announces is lost
                    log.exception("record_not_published")

    def _is_due(self, status: NodeStatus, pause_s: float) -> bool:
        """Whether `status` has news, or the record should not wait for the next check."""
        age_s = time.monotonic() + pause_s / 2 - self._told_at
        return _news(status) != self._told or age_s >= renew_after_s(self._directory.ttl_s)

    async def _publish(self, status: NodeStatus) -> None:
        now = time.monotonic()
        await self._directory.publish(status)
        # News that the DHT did not store is still news.
        self._told = _news(status) if self._directory.is_stored else None
        self._told_at = now

    def _status(self, state: State, span: Span) -> NodeStatus:
        facts, capacity, memory = self._facts, self.capacity(), psutil.virtual_memory()
        gpu_free, gpu_total = _gpu_memory(facts.device)
        return NodeStatus(
            state=state,
            model_id=facts.model_id,
            model_name=facts.model_name,
            num_blocks=facts.num_blocks,
            span=(span.start, span.end),
            dtype=DTYPE_NAMES[facts.dtype],
            quantization=facts.quant_type,
            protocol_version=VERSION,
            prefill_tokens_per_s=self.throughput.prefill_tokens_per_s,
            decode_tokens_per_s=self.throughput.decode_tokens_per_s,
            free_cache_tokens=capacity.free_tokens,
            total_cache_tokens=capacity.total_tokens,
            gpu_memory_total_bytes=gpu_total,
            gpu_memory_free_bytes=gpu_free,
            cpu_memory_total_bytes=memory.total,
            cpu_memory_free_bytes=memory.available,
            load=min(capacity.load, 1000.0),
            uptime_s=time.monotonic() - self._started_at,
            sessions=capacity.sessions,
            tokens=capacity.tokens,
            context_length=facts.context_length,
            public_name=facts.public_name,
            codecs=codec_names(),
            sent_bytes=dict(self._sent_bytes),
            movable=self.movable(),
            next_span=_pair(self._next_span),
            measured=self._packed(),
            max_blocks=facts.max_blocks,
            location=facts.location,
        )

    def _packed(self) -> bytes:
        """Packed link measurements; empty if they cannot be packed, so that the record is published
        anyway.
        """
        try:
            packed = pack_measured(self._measured())
            unpack_measured(packed)
        except Exception:  # a bug, or invalid measurements from other nodes
            log.exception("measured_links_not_packed")
            return b""
        return packed


def renew_after_s(ttl_s: float) -> float:
    """Seconds between renewals: two lost records do not make the node look dead.

    Also bounded for long-lived records, so that a changed address is soon known.
    """
    return min(ttl_s / 3, RENEW_S)


def _news(status: NodeStatus) -> object:
    """The fields that planners use; equal statuses need not be published again."""
    links = {link.digest for link in unpack_measured(status.measured)}
    return status.model_dump(exclude=_NO_NEWS), round(status.load, 1), links


def _pair(span: Span | None) -> tuple[int, int] | None:
    return None if span is None else (span.start, span.end)


def _gpu_memory(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)
