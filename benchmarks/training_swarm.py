"""Tokens per CPU second of LoRA training through three daemons, against PEFT in one process.

Processor time is that of daemons, of libp2p and of the client together. Then two daemons for each
span, by the processor time of the nodes alone. Then the session's own schedule is replayed with the
times that each pass took, as if every node had a core of its own.

T tokens of a micro-batch's texts, D hidden.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.footprint import Usage
from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import daemon_flags, open_local, torch_threads
from benchmarks.training import LocalTraining
from nesa_node.cli.services.local_swarm import LocalNode, local_swarm
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.training.finetuning_session import FinetuningOptions, FinetuningSession
from nesa_node.client.training.training_chain import TrainingChain
from nesa_node.client.training.training_link import TrainingLimits, TrainingLink
from nesa_node.client.training.training_span import MicroBatchPass, SpanState
from nesa_node.core.ids import Span, split_evenly
from nesa_node.engine.training.text_layout import plain_layout

DEFAULTS = Options(model="50m", nodes=(3,), threads=(1,), runs=5, prompt_tokens=128, batches=(8,))
"""`batches` are sequences of a micro-batch, of `prompt_tokens` each."""
QUICK = Options(model="tiny", nodes=(3,), threads=(1,), runs=1, prompt_tokens=8, batches=(1,))
MICRO_BATCHES = 16
CACHE_TOKENS = 2048
REPLAYED_S = 60.0
"""All passes of a step one after the other, in the replay."""


def run(options: Options) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")  # of what PEFT asks transformers by names that will go
    with model_folder(options) as folder, torch_threads(1):
        rows = [measure(folder, options, rows) for rows in options.batches]
    show(rows)
    return rows


def measure(folder: Path, options: Options, rows: int) -> dict[str, Any]:
    """PEFT, one node and two nodes for each span, in turns."""
    import peft

    config: Any = peft.LoraConfig(r=8, target_modules="all-linear")
    generator = torch.Generator().manual_seed(options.seed)
    vocabulary = int(open_local(folder).config.vocab_size)
    shape = (rows, options.prompt_tokens)
    batches = [torch.randint(vocabulary, shape, generator=generator) for _ in range(MICRO_BATCHES)]
    tokens = MICRO_BATCHES * rows * options.prompt_tokens
    spans = split_evenly(open_local(folder).num_blocks, options.nodes[0])
    local = LocalTraining(str(folder), config, options)
    runs: list[dict[str, float]] = []
    with (
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        local_swarm(
            folder,
            [*spans, *spans],
            Path(temporary),
            flags=[*daemon_flags(options, CACHE_TOKENS), "--training-gib", "4"],
            ready_timeout_s=300,
        ) as nodes,
    ):
        limits = FinetuningOptions(
            max_tokens=rows * options.prompt_tokens,
            # The first steps are measured: no state is fetched among them.
            checkpoint_every=1_000_000,
        )
        with (
            open_session(folder, options, nodes, config, limits, replicas=1) as single,
            open_session(folder, options, nodes, config, limits, replicas=2) as double,
        ):
            for turn in range(options.runs + 1):
                started = time.process_time()
                local.run_step(turn, batches)
                local_s = time.process_time() - started
                found = {
                    "local": tokens / local_s,
                    **run_step(single, batches, nodes, "single"),
                    **run_step(double, batches, nodes, "double"),
                }
                if turn:  # the first one allocates and compiles
                    runs.append(found)
            times = measure_passes(single, batches, options.runs)
    replayed = replay(times, spans)
    return {
        "rows": rows,
        "to_one_process": median(each["single"] / each["local"] for each in runs),
        "two_replicas_to_one": median(each["double_nodes"] / each["single_nodes"] for each in runs),
        "pass_s": times,
        "replayed_speedup": replayed,
        "tokens_per_cpu_s": {key: median(each[key] for each in runs) for key in runs[0]},
        "runs": runs,
    }


@contextmanager
def open_session(
    folder: Path,
    options: Options,
    nodes: Sequence[LocalNode],
    config: Any,
    limits: FinetuningOptions,
    *,
    replicas: int,
) -> Iterator[FinetuningSession]:
    with (
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=[nodes[0].addresses[0]], dtype=options.torch_dtype
        ) as model,
        model.finetuning_session(
            config, seed=options.seed, options=replace(limits, replicas=replicas)
        ) as session,
    ):
        assert len(session.hops) == replicas * options.nodes[0]
        yield session


def run_step(
    session: FinetuningSession, batches: Sequence[Tensor], nodes: Sequence[LocalNode], name: str
) -> dict[str, float]:
    """Tokens of a step per CPU second: of all processes, and of the nodes alone."""
    before = Usage.now(nodes)
    rows = torch.cat(list(batches))
    session.step({"input_ids": rows, "labels": rows})
    used = Usage.now(nodes).since(before)
    nodes_s, client_s, p2pd_s = (used[f"{part}_cpu_s"] for part in ("daemons", "client", "p2pd"))
    return {
        name: rows.numel() / (nodes_s + client_s + p2pd_s),
        f"{name}_nodes": rows.numel() / nodes_s,
    }


def measure_passes(
    session: FinetuningSession, batches: Sequence[Tensor], runs: int
) -> dict[str, list[float]]:
    """Median seconds of a micro-batch's passes, one at a time: of each span, and of the loss."""
    found: dict[str, list[list[float]]] = {"forward": [], "backward": [], "loss": [[]]}
    forward, backward = TrainingLink.forward, TrainingLink.backward
    loss = FinetuningSession._loss_and_gradient

    def record(kind: str, index: int, seconds: float) -> None:
        while len(found[kind]) <= index:
            found[kind].append([])
        found[kind][index].append(seconds)

    async def timed_forward(link: TrainingLink, *args: Any, **more: Any) -> Tensor:
        started = time.perf_counter()
        result = await forward(link, *args, **more)
        record("forward", session.hops.index(link.hop), time.perf_counter() - started)
        return result

    async def timed_backward(link: TrainingLink, *args: Any, **more: Any) -> Tensor:
        started = time.perf_counter()
        result = await backward(link, *args, **more)
        record("backward", session.hops.index(link.hop), time.perf_counter() - started)
        return result

    def timed_loss(own: FinetuningSession, *args: Any) -> Any:
        started = time.perf_counter()
        result = loss(own, *args)
        record("loss", 0, time.perf_counter() - started)
        return result

    with (
        patch.object(TrainingLink, "forward", timed_forward),
        patch.object(TrainingLink, "backward", timed_backward),
        patch.object(FinetuningSession, "_loss_and_gradient", timed_loss),
    ):
        for _ in range(runs):
            for ids_RL in batches[:4]:
                session.step({"input_ids": ids_RL, "labels": ids_RL})
    return {kind: [median(each) for each in times] for kind, times in found.items()}


def replay(times: dict[str, list[float]], spans: Sequence[Span]) -> float:
    """How much faster than one process the session's schedule is, with a core for each node.

    One process takes the sum of all passes.
    """
    one_s = MICRO_BATCHES * sum(map(sum, times.values()))
    scale = REPLAYED_S / one_s  # long enough that the event loop's own time does not count

    async def run_all() -> float:
        replayed: Any = [
            ReplayedSpan(span, scale * forward_s, scale * backward_s)
            for span, forward_s, backward_s in zip(
                spans, times["forward"], times["backward"], strict=True
            )
        ]
        request: Any = SimpleNamespace(span=Span(spans[0].start, spans[-1].end))
        nodes: Any = ReplayedNodes(replayed)
        limits = TrainingLimits(max_tokens=1, max_kept_tokens=8)
        chain = TrainingChain(request, nodes, limits)
        client = asyncio.Lock()

        async def loss(_: int, output_TD: Tensor) -> Tensor:
            async with client:
                await asyncio.sleep(scale * times["loss"][0])
            return output_TD

        await chain.open(SpanState(0, {}))
        started = time.perf_counter()
        layout = plain_layout([1])
        await chain.run_step([(layout, 0, torch.zeros(1, 1)) for _ in range(MICRO_BATCHES)], loss)
        return (time.perf_counter() - started) / scale

    return one_s / asyncio.run(run_all())


class ReplayedNodes:
    """In place of `TrainingNodes`."""

    lanes = 1
    lacks_replicas = False

    def __init__(self, groups: list[ReplayedSpan]) -> None:
        self.groups = groups

    async def complete(self, *, grow: bool = False) -> bool:
        del grow
        return False


class ReplayedSpan:
    """A `TrainingSpan` that takes its time, one pass after the other."""

    lanes = 1

    def __init__(self, span: Span, forward_s: float, backward_s: float) -> None:
        self.span = span
        self._forward_s, self._backward_s = forward_s, backward_s
        self._core = asyncio.Lock()

    async def begin(self, step: int) -> None:
        del step

    async def synchronize(self, applied: int) -> bool:
        return applied == 0

    async def restore(self, state: SpanState) -> None:
        del state

    async def forward(self, batch: MicroBatchPass, hidden_TD: Tensor) -> Tensor:
        del batch
        async with self._core:
            await asyncio.sleep(self._forward_s)
        return hidden_TD

    async def backward(
        self, batch: MicroBatchPass, grad_TD: Tensor, turn: AbstractAsyncContextManager[None]
    ) -> Tensor:
        del batch
        async with turn:
            pass
        async with self._core:
            await asyncio.sleep(self._backward_s)
        return grad_TD


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        f"LoRA training through three nodes, {MICRO_BATCHES} micro-batches a step",
        "sequences|PEFT\ntokens/CPU s|through nodes|of PEFT's|two replicas, of one\n(nodes' CPU)"
        "|replayed, a core\nfor each node",
        [
            [
                str(row["rows"]),
                f"{row['tokens_per_cpu_s']['local']:.0f}",
                f"{row['tokens_per_cpu_s']['single']:.0f}",
                f"{row['to_one_process']:.2f}",
                f"{row['two_replicas_to_one']:.2f}",
                f"{row['replayed_speedup']:.2f}",
            ]
            for row in rows
        ],
    )
