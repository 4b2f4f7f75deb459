"""Sessions generate while nodes are killed, drained and added.

Every span has two nodes. Every `EVERY_S` seconds something random and seeded happens; whoever is
lost is replaced, and the next event waits until the replacement serves. What the sessions generate
is compared with what the same swarm generated before the first event. A recovery is the longest
wait for a token of a session that used the node, from the event on; the replacement starts only
`RECOVERY_S` later, so that its start takes no processor time from that. The daemons are forked from
a process that has imported torch already (`tests/faults`), so that one is replaced in a moment.

In float32 the tokens must be equal, but where the model itself cannot tell two tokens apart: a
first divergence is excused, and counted, where their logits are closer than 1e-5 x max|logit|.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.events import Event, Kind, choose_event, longest_wait
from benchmarks.figures import percentile
from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import join, open_local
from benchmarks.workload import Worker, working
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import ConfigError, SwarmError
from nesa_node.core.ids import Span, split_evenly
from tests.faults.bed import Bed, open_bed
from tests.faults.nursery import open_nursery

DEFAULTS = Options(model="50m", nodes=(3,), sessions=(8,), runs=1, new_tokens=400)
QUICK = Options(model="tiny", nodes=(2,), sessions=(2,), runs=1, new_tokens=64, seconds=15)
REPLICAS = 2
SPARE_NODES = 2
PROMPTS = 2
"""Of each session."""
EVERY_S = 5.0
RECOVERY_S = 2.0
DRAIN_TIMEOUT_S = 60.0
CLOSENESS = 1e-5


@dataclass(frozen=True, slots=True)
class Happened:
    event: Event
    at: float
    """`time.perf_counter()`"""
    hit: tuple[int, ...]
    """The sessions that used the node."""


def run(options: Options) -> list[dict[str, Any]]:
    """One row for all sessions, and one for each kind of event."""
    torch.set_num_threads(1)
    if options.dtype != "float32":
        raise ConfigError("churn compares tokens, which are equal in float32 only")
    with (
        model_folder(options) as folder,
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        open_nursery() as nursery,
        open_bed(nursery, folder, Path(temporary)) as bed,
    ):
        spans = split_evenly(open_local(folder).num_blocks, options.nodes[0])
        flags = daemon_flags(options)
        bed.start(spans * REPLICAS, *flags)
        with (
            join(folder, options, bed.addresses) as plain,
            join(folder, options, bed.addresses, replicate_cache=True) as warm,
        ):
            count = options.sessions[0]
            models = [warm if is_warm(n, count) else plain for n in range(count)]
            calm = make_workers(models, options)
            with working(calm, stopping := threading.Event()):
                stopping.set()
            workers = make_workers(models, options)
            started = time.perf_counter()
            with working(workers, threading.Event()):
                happened = churn(bed, workers, options, flags)
            seconds = time.perf_counter() - started
        differences = compare(calm, workers, load_local(folder, options))
    rows = [
        summarize(workers, happened, differences, seconds),
        summarize_kind("kill", workers, happened, title="kill (replay)", warm=False),
        summarize_kind("kill", workers, happened, title="kill (warm standby)", warm=True),
        summarize_kind("drain", workers, happened, title="drain"),
    ]
    show(rows, options)
    return rows


def is_warm(session: int, sessions: int) -> bool:
    """Whether a session keeps a warm standby: every other one, and one that is alone."""
    return session % 2 == 1 or sessions == 1


def make_workers(models: Sequence[DistributedModelForCausalLM], options: Options) -> list[Worker]:
    """One for each of `models`; the same prompts each time."""
    return [
        Worker(
            model,
            [
                random_prompt(model, options.prompt_tokens, options.seed + PROMPTS * session + n)
                for n in range(PROMPTS)
            ],
            options.new_tokens,
        )
        for session, model in enumerate(models)
    ]


def daemon_flags(options: Options) -> list[str]:
    """Room on each node for every session of the swarm, its standby, and its successor."""
    tokens = str(3 * options.sessions[0] * (options.prompt_tokens + options.new_tokens + 64))
    flags = ["--attn-cache-tokens", tokens, "--max-cache-tokens-per-peer", tokens]
    return [*flags, "--log-level", "warning"]


def churn(
    bed: Bed, workers: Sequence[Worker], options: Options, flags: Sequence[str]
) -> list[Happened]:
    """Let things happen for `options.seconds`."""
    rng = random.Random(options.seed)
    most_nodes = len(bed.nodes) + SPARE_NODES
    happened: list[Happened] = []
    ending = time.perf_counter() + options.seconds
    following = time.perf_counter() + EVERY_S
    while following < ending:
        time.sleep(max(following - time.perf_counter(), 0))
        event = choose_event(rng, serving(bed), most_nodes=most_nodes)
        following = time.perf_counter() + EVERY_S
        happened.append(strike(bed, workers, event, flags))
        following = max(following, time.perf_counter())
    return happened


def serving(bed: Bed) -> dict[Span, list[str]]:
    """The peer ids of each span's nodes, in the order of their start."""
    spans = sorted({node.span for node in bed.nodes})
    return {span: [node.peer_id for node in bed.nodes if node.span == span] for span in spans}


def strike(bed: Bed, workers: Sequence[Worker], event: Event, flags: Sequence[str]) -> Happened:
    """Let it happen, and return once whoever was lost is replaced."""
    at = time.perf_counter()
    if event.peer_id is None:
        bed.start([event.span], *flags)
        return Happened(event, at, ())
    victim = bed[event.peer_id]
    hit = tuple(n for n, worker in enumerate(workers) if event.peer_id in worker.peers())
    bed.nodes.remove(victim)
    victim.process.send_signal(signal.SIGKILL if event.kind == "kill" else signal.SIGTERM)
    time.sleep(RECOVERY_S)
    if len(serving(bed)[event.span]) < REPLICAS:
        bed.start([event.span], *flags)
    victim.process.wait(DRAIN_TIMEOUT_S)
    return Happened(event, at, hit)


def compare(calm: Sequence[Worker], workers: Sequence[Worker], local: Any) -> dict[str, int]:
    """How many texts are not those of the calm swarm, and how many of these are excused."""
    if failures := [failure for worker in calm for failure in worker.failures]:
        raise SwarmError(f"a session failed before anything happened: {failures[0]}")
    found = {"differ": 0, "excused": 0}
    for before, worker in zip(calm, workers, strict=True):
        expected = {number: generation.tokens for number, generation in before.generations}
        for number, generation in worker.generations:
            if generation.tokens != expected[number]:
                prompt = worker.prompts[number][0].tolist()
                close = is_close_call(local, prompt, expected[number], generation.tokens)
                found["excused" if close else "differ"] += 1
    return found


@torch.inference_mode()
def is_close_call(
    local: Any, prompt: Sequence[int], expected: Sequence[int], ours: Sequence[int]
) -> bool:
    """Whether the model itself cannot tell the first two tokens apart that differ."""
    if len(ours) != len(expected):
        return False
    at = next(n for n, (a, b) in enumerate(zip(expected, ours, strict=True)) if a != b)
    logits_V = local(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1]
    bound = CLOSENESS * logits_V.abs().max()
    return bool((logits_V[[expected[at], ours[at]]] > logits_V.max() - bound).all())


def pauses(happened: Happened, workers: Sequence[Worker], warm: bool | None = None) -> list[float]:
    """Of each session that was hit, with a standby or without: its longest wait from then on."""
    until = happened.at + RECOVERY_S
    waits = [
        [longest_wait(times, happened.at, until) for times in workers[number].token_times()]
        for number in happened.hit
        if warm in (None, is_warm(number, len(workers)))
    ]
    known = [[wait for wait in of if wait is not None] for of in waits]
    return [max(of) for of in known if of]


def summarize(
    workers: Sequence[Worker],
    happened: Sequence[Happened],
    differences: dict[str, int],
    seconds: float,
) -> dict[str, Any]:
    generations = [generation for worker in workers for _, generation in worker.generations]
    gaps_s = [gap for generation in generations for gap in generation.gaps_s]
    started = min(generation.started for generation in generations)
    events = [
        {
            "kind": one.event.kind,
            "span": str(one.event.span),
            "at_s": one.at - started,
            "sessions_hit": len(one.hit),
            "pauses_s": pauses(one, workers),
        }
        for one in happened
    ]
    failures = [failure for worker in workers for failure in worker.failures]
    return {
        "kind": "all",
        "sessions": len(workers),
        "events": len(happened),
        "texts": len(generations),
        "tokens": sum(len(generation.tokens) for generation in generations),
        "sessions_failed": len(failures),
        "texts_that_differ": differences["differ"],
        "texts_excused": differences["excused"],
        "pause_p50_s": percentile(gaps_s, 50),
        "pause_p95_s": percentile(gaps_s, 95),
        "runs": [{"seconds": seconds, "events": events, "failures": failures}],
    }


def summarize_kind(
    kind: Kind,
    workers: Sequence[Worker],
    happened: Sequence[Happened],
    *,
    title: str,
    warm: bool | None = None,
) -> dict[str, Any]:
    """Of the sessions with a standby or without, or of all."""
    of_kind = [one for one in happened if one.event.kind == kind]
    waits = [pause for one in of_kind for pause in pauses(one, workers, warm)]
    return {
        "kind": title,
        "events": len(of_kind),
        "sessions": sum(
            warm in (None, is_warm(n, len(workers))) for one in of_kind for n in one.hit
        ),
        "pause_p50_s": percentile(waits, 50) if waits else None,
        "pause_p95_s": percentile(waits, 95) if waits else None,
        "runs": [{"pauses_s": waits}],
    }


def show(rows: Sequence[dict[str, Any]], options: Options) -> None:
    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1000:.0f}"

    keys = ("events", "sessions", "sessions_failed", "texts", "texts_that_differ", "texts_excused")
    cells = [
        (
            str(row["kind"]),
            *(str(row.get(key, "")) for key in keys),
            "not measured" if row["pause_p50_s"] is None else ms(row["pause_p50_s"]),
            ms(row["pause_p95_s"]),
        )
        for row in rows
    ]
    headings = "|events|sessions|failed|texts|differ|excused|pause p50 ms|p95 ms"
    title = f"churn: {options.model}, {options.dtype}, {options.nodes[0]} spans of {REPLICAS} nodes"
    print_table(title, headings, cells)
