"""Prometheus metrics of a daemon, read from existing state at every scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import get_args

from nesa_node.core import metric_names as names
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import Sample, Source, counted
from nesa_node.server.announcer import State
from nesa_node.server.moves import Answer
from nesa_node.server.refusal_log import CODES
from nesa_node.server.served_span import ServedSpan
from nesa_node.server.spans import Spans
from nesa_node.swarm.metrics import model_samples, swarm_samples
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)

LOOK_EVERY_S = 20.0
"""Interval between directory fetches: bounds the age of metrics about other nodes."""


def about(swarm: Swarm, role: str, version: str) -> Source:
    """Samples of any daemon, also of one that serves no blocks."""
    labels = (role, version, swarm.identity.peer_id)

    def samples() -> Iterator[Sample]:
        yield Sample(names.INFO, labels, 1)
        yield from swarm_samples(swarm)

    return samples


def about_model(swarm: Swarm, model_id: ModelId, num_blocks: int | None = None) -> Source:
    """Samples about the nodes of a model; `keep_looking` keeps them current."""
    return partial(model_samples, swarm.directory, model_id, num_blocks)


def about_node(spans: Spans) -> Source:
    """Samples of a node over all its spans: counters continue when it moves."""
    return partial(_node_samples, spans)


async def keep_looking(swarm: Swarm, model_id: ModelId, num_blocks: int | None = None) -> None:
    """Fetch the records of a model regularly until cancelled."""
    while True:
        try:
            await swarm.directory.fetch(model_id, num_blocks)
        except (SwarmError, OSError) as error:
            log.info("directory_not_refreshed", reason=str(error))
        except Exception:  # a bug: the daemon continues, and so does this loop
            log.exception("directory_not_refreshed")
        await asyncio.sleep(LOOK_EVERY_S)


def _node_samples(spans: Spans) -> Iterator[Sample]:
    model, tallies = (spans.served.model_id,), spans.scheduler.tallies
    yield Sample(names.NODE_STEPS, model, tallies.steps)
    yield Sample(names.NODE_FAILURES, model, tallies.failed)
    yield Sample(names.NODE_TOKENS, (*model, "prefill"), tallies.prefill_tokens)
    yield Sample(names.NODE_TOKENS, (*model, "decode"), tallies.decode_tokens)
    yield Sample(names.BATCH, model, tallies.batch)
    yield Sample(names.ITERATION, model, tallies.iteration_s)
    yield Sample(names.NODE_STEP, model, tallies.step_s)
    yield Sample(names.LOAD, model, spans.scheduler.load)
    for state in get_args(State):
        yield Sample(names.STATE, (*model, state), float(state == spans.announcer.state))
    for answer in get_args(Answer):
        yield Sample(names.MOVES, (answer,), spans.moves.answers[answer])
    yield from counted(names.REFUSED_STREAMS, spans.refusals.streams, CODES)
    yield from counted(names.REFUSED_MESSAGES, spans.refusals.messages, CODES)
    asked, found = spans.prefix_tokens()
    yield Sample(names.PREFIX_QUERIES, model, asked)
    yield Sample(names.PREFIX_HITS, model, found)
    yield from _part_samples(spans.part, spans)


def _part_samples(part: ServedSpan | None, spans: Spans) -> Iterator[Sample]:
    """Samples of the span served now; zeros without one."""
    model_id = spans.served.model_id
    model, waiting = (model_id,), spans.scheduler.waiting
    sessions = 0 if part is None else part.admission.sessions
    yield Sample(names.RUNNING, (model_id, "node"), max(sessions - waiting, 0))
    yield Sample(names.WAITING, (model_id, "node"), waiting)
    pool = None if part is None else part.admission.pool
    pages = 1 if pool is None else pool.num_pages
    held, free = (0, pages) if pool is None else (pool.held_pages, max(pool.free_pages, 0))
    yield Sample(names.CACHE_USED, model, held / pages)
    yield Sample(names.CACHE_PROMISED, model, 1 - free / pages)
    yield Sample(names.CACHE_TOKENS, model, 0 if part is None else part.admission.total_tokens)
    span = None if part is None else part.blocks.span
    yield Sample(names.SPAN_START, model, 0 if span is None else span.start)
    yield Sample(names.SPAN_END, model, 0 if span is None else span.end)
    yield Sample(names.WEIGHTS, model, 0 if part is None else part.blocks.weight_bytes)
    speed = spans.announcer.throughput
    yield Sample(names.SPEED, (*model, "prefill"), speed.prefill_tokens_per_s)
    yield Sample(names.SPEED, (*model, "decode"), speed.decode_tokens_per_s)
