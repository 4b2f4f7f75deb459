"""A node of a session's chain is frozen (SIGSTOP) in the middle: how long until the next token.

Every span has two nodes. Each run freezes the daemon of one hop, chosen by the seed, at a token
chosen by the seed, and thaws it when the text is done. `noticed_s` is the time until the session
gives the hop up, `recovered_s` the time until the next token. Every text is compared with local
transformers', by the rule of CONTRIBUTING.md. With `--sessions 4`, three others generate meanwhile:
what they suspect falsely is counted, too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.figures import percentile
from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import open_local
from benchmarks.workload import Worker, working
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import split_evenly
from nesa_node.core.settings.choices import RouteName
from tests.faults.bed import Bed, Node, open_bed
from tests.faults.nursery import open_nursery
from tests.faults.runs import Blow, assert_undisturbed, generate, join_bed

DEFAULTS = Options(model="50m", nodes=(3,), sessions=(1,), runs=30, new_tokens=64)
QUICK = Options(model="tiny", nodes=(2,), sessions=(1,), runs=2, new_tokens=48)
REPLICAS = 2
FIRST, LAST = 5, 24
"""The first token that a node is frozen after, and how many must be left then."""
WITHIN_STEP_S = 0.02
TARGET_S = 2.0
ROUTES: tuple[RouteName, ...] = ("chain", "star")


def run(options: Options) -> list[dict[str, Any]]:
    """One row for each route."""
    torch.set_num_threads(1)
    if options.dtype != "float32":
        raise ConfigError("frozen compares tokens, which are equal in float32 only")
    rows = []
    with (
        model_folder(options) as folder,
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        open_nursery() as nursery,
        open_bed(nursery, folder, Path(temporary)) as bed,
    ):
        spans = split_evenly(open_local(folder).num_blocks, options.nodes[0])
        bed.start(spans * REPLICAS)
        local = load_local(folder, options)
        for routing in ROUTES:
            with ExitStack() as stack:
                model = stack.enter_context(join_bed(bed, routing))
                for _ in range(options.sessions[0] - 1):
                    stack.enter_context(_busy(bed, routing, options))
                runs = [
                    freeze_once(bed, model, local, options, random.Random(f"{routing} {seed}"))
                    for seed in range(options.seed, options.seed + options.runs)
                ]
            rows.append(summarize(routing, runs))
    show(rows, options)
    return rows


@contextmanager
def _busy(bed: Bed, routing: RouteName, options: Options) -> Iterator[None]:
    """Another client's session, which generates all the time."""
    with join_bed(bed, routing) as model:
        worker = Worker(model, [random_prompt(model, options.prompt_tokens, 1)], options.new_tokens)
        with working([worker], threading.Event()):
            yield


def freeze_once(
    bed: Bed,
    model: DistributedModelForCausalLM,
    local: Any,
    options: Options,
    rng: random.Random,
) -> dict[str, Any]:
    ids_BL = random_prompt(local, options.prompt_tokens, rng.randrange(1 << 30))
    with model.inference_session(ids_BL.shape[1] + options.new_tokens) as session:
        hop = rng.randrange(len(session.hops))
        victim = bed[session.hops[hop].peer_id]
        with _thawed_at_the_end(victim) as freeze:
            blow = Blow(
                after=rng.randrange(FIRST, options.new_tokens - LAST),
                strike=freeze,
                delay_s=rng.uniform(0.001, WITHIN_STEP_S),
            )
            output_BL = generate(
                model, ids_BL, session, new_tokens=options.new_tokens, streamer=blow
            )
            blow.check()
            losses = session.failovers
    assert_undisturbed(local, output_BL, ids_BL, new_tokens=options.new_tokens)
    recovered_s = blow.recovery_s()
    mended_s = losses[0].took_ms / 1000 if losses else 0.0
    row = {
        "hop": hop,
        "after": blow.after,
        "recovered_s": recovered_s,
        "mended_s": mended_s,
        "noticed_s": recovered_s - mended_s,
        "replaced": [victim.peer_id] == [peer for loss in losses for peer in loss.lost],
    }
    print(json.dumps(row), flush=True)
    return row


@contextmanager
def _thawed_at_the_end(victim: Node) -> Iterator[Callable[[], None]]:
    try:
        yield lambda: os.kill(victim.process.pid, signal.SIGSTOP)
    finally:
        os.kill(victim.process.pid, signal.SIGCONT)
        time.sleep(0.5)


def summarize(routing: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"route": routing, "count": len(runs)}
    for name in ("noticed_s", "mended_s", "recovered_s"):
        seconds = [run[name] for run in runs]
        row |= {f"{name}_p50": percentile(seconds, 50), f"{name}_p95": percentile(seconds, 95)}
        row[f"{name}_most"] = max(seconds)
    return {
        **row,
        "replaced_only_the_frozen": sum(run["replaced"] for run in runs),
        "passed": row["recovered_s_p95"] <= TARGET_S and all(run["replaced"] for run in runs),
        "runs": runs,
    }


def show(rows: list[dict[str, Any]], options: Options) -> None:
    cells = [
        (
            row["route"],
            str(row["count"]),
            *(
                " / ".join(f"{row[f'{name}_{part}']:.2f}" for part in ("p50", "p95", "most"))
                for name in ("noticed_s", "mended_s", "recovered_s")
            ),
            str(row["replaced_only_the_frozen"]),
            "yes" if row["passed"] else "NO",
        )
        for row in rows
    ]
    print_table(
        f"frozen: {options.model}, {options.nodes[0]} spans of {REPLICAS} nodes; "
        "seconds, p50 / p95 / most",
        "route|runs|noticed|mended|next token|only it replaced|passed",
        cells,
    )
