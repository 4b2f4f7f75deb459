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

from nesa_node.compression.codecs import codec_names
from nesa_node.compression.tensors import DTYPE_NAMES
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.choices import CacheDtype, QuantType
from nesa_node.engine.model.devices import SpanThroughput
from nesa_node.swarm.dht.records import NodeStatus
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.protocol.messages import VERSION
from nesa_node.topology.links.matrix import MeasuredLink, pack_links, unpack_links
from nesa_node.topology.roofline import Roofline, pack_roofline

log = get_logger(__name__)

AnnouncedState = Literal["joining", "serving", "draining"]
CHECK_INTERVAL_S = 10.0
"""Interval at which the record is compared with the node's state: bounds the age of free cache,
load and other planning inputs, besides the DHT's own delay. An unchanged record is only renewed
before it expires."""
MAX_RENEW_INTERVAL_S = 20.0
_VOLATILE_FIELDS = {
    "uptime_s",
    "cpu_memory_free_bytes",
    "gpu_memory_free_bytes",
    "load",
    "measured",
}
"""Fields that differ each time and are not compared; `load` and links are compared with less
precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts that do not change while the node runs."""

    model_id: str
    model_name: str
    num_blocks: int
    context_length: int
    dtype: torch.dtype
    quant_type: QuantType
    cache_dtype: CacheDtype = "auto"
    device: torch.device
    public_name: str | None
    max_blocks: int
    location: tuple[float, float] | None
    roofline: Roofline | None = None
    operator: str | None = None


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
        measured_links: Callable[[], Sequence[MeasuredLink]] = tuple,
        is_movable: Callable[[], bool] = bool,
    ) -> None:
        """`sent_bytes` counts bytes of hidden states by codec; all are read for every record."""
        self.throughput = SpanThroughput(0.0, 0.0)
        self.capacity: Callable[[], Capacity] = Capacity
        self.private_schemes: Callable[[], tuple[str, ...]] = tuple
        self._is_movable = is_movable
        self._sent_bytes = Counter() if sent_bytes is None else sent_bytes
        self._measured_links = measured_links
        self._directory = directory
        self._facts = facts
        self._started_at = time.monotonic()
        self.state: AnnouncedState = "joining"
        """The announced state."""
        self._span: Span | None = None
        self._next_span: Span | None = None
        self._published: object = None
        self._published_at = -math.inf

    async def announce(
        self, state: AnnouncedState, span: Span, *, next_span: Span | None = None
    ) -> None:
        """Publish this state now and in later renewals. `next_span` is the span to which the node
        moves.

        When the process has no file descriptors left, `run` publishes it later.
        """
        self.state, self._span, self._next_span = state, span, next_span
        try:
            await self._publish(self._status(span))
        except OSError as error:
            log.warning("record_not_published", reason=str(error))

    async def run(self) -> None:
        """Publish whenever due until cancelled; errors are logged."""
        pause_s = min(CHECK_INTERVAL_S, renew_after_s(self._directory.ttl_s))
        while True:
            await asyncio.sleep(pause_s)
            if self._span is not None:
                try:
                    status = self._status(self._span)
                    if self._is_due(status, pause_s):
                        await self._publish(status)
                except (SwarmError, OSError) as error:
                    # Such as running out of file descriptors.
                    log.warning("record_not_published", reason=str(error))
                except Exception:  # a bug: a node that no longer announces is lost
                    log.exception("record_not_published")

    def _is_due(self, status: NodeStatus, pause_s: float) -> bool:
        """Whether `status` has news, or the record should not wait for the next check."""
        age_s = time.monotonic() + pause_s / 2 - self._published_at
        return _comparable(status) != self._published or age_s >= renew_after_s(
            self._directory.ttl_s
        )

    async def _publish(self, status: NodeStatus) -> None:
        now = time.monotonic()
        await self._directory.publish(status)
        # News that the DHT did not store is still news.
        self._published = _comparable(status) if self._directory.is_stored else None
        self._published_at = now

    def _status(self, span: Span) -> NodeStatus:
        facts, capacity, memory = self._facts, self.capacity(), psutil.virtual_memory()
        gpu_free, gpu_total = _gpu_memory(facts.device)
        return NodeStatus(
            state=self.state,
            model_id=facts.model_id,
            model_name=facts.model_name,
            num_blocks=facts.num_blocks,
            span=(span.start, span.end),
            dtype=DTYPE_NAMES[facts.dtype],
            quantization=facts.quant_type,
            cache_dtype=facts.cache_dtype,
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
            movable=self._is_movable(),
            next_span=_span_pair(self._next_span),
            measured=self._packed_links(),
            max_blocks=facts.max_blocks,
            location=facts.location,
            figures=pack_roofline(facts.roofline),
            operator=facts.operator,
            private_schemes=self.private_schemes(),
        )

    def _packed_links(self) -> bytes:
        """Packed measurements; empty if they cannot be packed: the record is published anyway."""
        try:
            packed = pack_links(self._measured_links())
            unpack_links(packed)
        except Exception:  # a bug, or invalid measurements from other nodes
            log.exception("measured_links_not_packed")
            return b""
        return packed


def renew_after_s(ttl_s: float) -> float:
    """Seconds between renewals: two lost records do not make the node look dead.

    Also bounded for long-lived records, so that a changed address is soon known.
    """
    return min(ttl_s / 3, MAX_RENEW_INTERVAL_S)


def _comparable(status: NodeStatus) -> object:
    """The fields that planners use; equal statuses need not be published again."""
    links = {link.digest for link in unpack_links(status.measured)}
    return status.model_dump(exclude=_VOLATILE_FIELDS), round(status.load, 1), links


def _span_pair(span: Span | None) -> tuple[int, int] | None:
    return None if span is None else (span.start, span.end)


def _gpu_memory(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)
