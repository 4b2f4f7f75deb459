"""Prometheus metrics of a daemon, read from existing state at every scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import get_args

from nesa_node.core import metrics
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricSample, MetricSource, count_by_label
from nesa_node.server.node.announcer import AnnouncedState
from nesa_node.server.node.move_limiter import MoveOutcome
from nesa_node.server.node.served_span import DecoderSpan, ServedSpan
from nesa_node.server.node.span_runner import SpanRunner
from nesa_node.server.session.message_loop import REFUSAL_CODES
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.node import Swarm, model_samples, swarm_samples

log = get_logger(__name__)

DIRECTORY_REFRESH_S = 20.0
"""Interval between directory fetches: bounds the age of metrics about other nodes."""


def daemon_source(swarm: Swarm, role: str, version: str) -> MetricSource:
    """Samples of any daemon, also of one that serves no blocks."""
    labels = (role, version, swarm.identity.peer_id)

    def samples() -> Iterator[MetricSample]:
        yield MetricSample(metrics.PROCESS_INFO, labels, 1)
        yield from swarm_samples(swarm)

    return samples


def model_source(swarm: Swarm, model_id: ModelId, num_blocks: int | None = None) -> MetricSource:
    """Samples about the nodes of a model; `refresh_directory` keeps them current."""
    return partial(model_samples, swarm.directory, model_id, num_blocks)


def node_source(runner: SpanRunner) -> MetricSource:
    """Samples of a node over all its spans: counters continue when it moves."""
    return partial(_node_samples, runner)


async def refresh_directory(
    directory: Directory, model_id: ModelId, num_blocks: int | None = None
) -> None:
    """Fetch the records of a model regularly until cancelled."""
    while True:
        try:
            await directory.fetch(model_id, num_blocks)
        except (SwarmError, OSError) as error:
            log.info("directory_not_refreshed", reason=str(error))
        except Exception:  # a bug: the daemon continues, and so does this loop
            log.exception("directory_not_refreshed")
        await asyncio.sleep(DIRECTORY_REFRESH_S)


def _node_samples(runner: SpanRunner) -> Iterator[MetricSample]:
    model, tallies = (runner.served.model_id,), runner.scheduler.stats
    yield MetricSample(metrics.NODE_STEPS, model, tallies.steps)
    yield MetricSample(metrics.NODE_FAILURES, model, tallies.failed)
    yield MetricSample(metrics.NODE_TOKENS, (*model, "prefill"), tallies.prefill_tokens)
    yield MetricSample(metrics.NODE_TOKENS, (*model, "decode"), tallies.decode_tokens)
    yield MetricSample(metrics.BATCH_SIZE, model, tallies.batch)
    yield MetricSample(metrics.ITERATION_TIME, model, tallies.iteration_s)
    yield MetricSample(metrics.NODE_STEP_LATENCY, model, tallies.step_s)
    yield MetricSample(metrics.NODE_LOAD, model, runner.scheduler.load)
    for state in get_args(AnnouncedState):
        yield MetricSample(
            metrics.NODE_STATE, (*model, state), float(state == runner.announcer.state)
        )
    for answer in get_args(MoveOutcome):
        yield MetricSample(metrics.MOVE_REQUESTS, (answer,), runner.move_limiter.outcomes[answer])
    yield from count_by_label(metrics.REFUSED_STREAMS, runner.refusals.streams, REFUSAL_CODES)
    yield from count_by_label(metrics.REFUSED_MESSAGES, runner.refusals.messages, REFUSAL_CODES)
    asked, found = runner.prefix_tokens()
    yield MetricSample(metrics.PREFIX_QUERIES, model, asked)
    yield MetricSample(metrics.PREFIX_HITS, model, found)
    yield from _span_samples(runner.served_span, runner)


def _span_samples(served_span: ServedSpan | None, runner: SpanRunner) -> Iterator[MetricSample]:
    """Samples of the span served now; zeros without one."""
    model_id = runner.served.model_id
    model, waiting = (model_id,), runner.scheduler.waiting_sessions
    admission = served_span.admission if isinstance(served_span, DecoderSpan) else None
    sessions = 0 if admission is None else admission.sessions
    yield MetricSample(metrics.REQUESTS_RUNNING, (model_id, "node"), max(sessions - waiting, 0))
    yield MetricSample(metrics.REQUESTS_WAITING, (model_id, "node"), waiting)
    pool = None if admission is None else admission.pool
    pages = 1 if pool is None else pool.num_pages
    held, free = (0, pages) if pool is None else (pool.held_pages, max(pool.unreserved_pages, 0))
    yield MetricSample(metrics.KV_CACHE_USAGE, model, held / pages)
    yield MetricSample(metrics.KV_CACHE_RESERVED, model, 1 - free / pages)
    yield MetricSample(
        metrics.KV_CACHE_CAPACITY,
        model,
        0 if admission is None else admission.total_tokens,
    )
    span = None if served_span is None else served_span.span
    yield MetricSample(metrics.SPAN_START, model, 0 if span is None else span.start)
    yield MetricSample(metrics.SPAN_END, model, 0 if span is None else span.end)
    yield MetricSample(
        metrics.WEIGHT_BYTES, model, 0 if served_span is None else served_span.weight_bytes
    )
    speed = runner.announcer.throughput
    yield MetricSample(metrics.MEASURED_THROUGHPUT, (*model, "prefill"), speed.prefill_tokens_per_s)
    yield MetricSample(metrics.MEASURED_THROUGHPUT, (*model, "decode"), speed.decode_tokens_per_s)
