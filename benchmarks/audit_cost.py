"""What seals and audits cost: tokens/s without seals, with seals, and with 1 % of hops audited.

Sessions of one client, alone and sixteen at once, over the same daemons; the three kinds take turns
batch by batch. Sixteen sessions meet in nodes' iterations in ever other ways, so that the time of a
batch differs by some percent: ratios are those of all batches together, with 95 % intervals (of a
thousand samples of turns). Of every hundred hops of the third kind exactly one is audited, so that
runs do not differ by chance; the client computes it again from its own weights, on the same
machine, and a batch has ended when its audits have. Daemons hash nothing for a client that speaks a
version before seals. The model has real weights, for which bounds were fitted: random ones round so
much more that audits compute again several times before they pass.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.footprint import Usage
from benchmarks.generation import generate
from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import Swarm, join, open_swarm
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.session import hop_opening
from nesa_node.client.verification.auditor import Auditor
from nesa_node.client.verification.session_audit import HopWork
from nesa_node.core.ids import PeerId

DEFAULTS = Options(model="demo", nodes=(3,), sessions=(1, 16), threads=(1,))
QUICK = Options(model="tiny", nodes=(2,), sessions=(1, 2), runs=1, new_tokens=8, threads=(1,))
RATE = 0.01
BEFORE_SEALS = (1, 6)
KINDS = ("no seals", "seals", "audits")


class EveryHundredth(random.Random):
    """Draws each hundredth hop, and leaves out no session for its size."""

    def __init__(self) -> None:
        super().__init__(0)
        self._numbers = itertools.cycle([1.0] * (round(1 / RATE) - 1) + [0.0])

    def random(self) -> float:
        return next(self._numbers)


def run(options: Options) -> list[dict[str, Any]]:
    rows = []
    with model_folder(options) as folder:
        local = load_local(folder, options)
        for nodes in options.nodes:
            cache_tokens = 4 * max(options.sessions) * 256 + 8192
            with (
                open_swarm(folder, options, nodes, cache_tokens, options.threads[0]) as swarm,
                ExitStack() as stack,
            ):
                addresses = [node.addresses[0] for node in swarm.nodes]
                models = {
                    kind: stack.enter_context(join(folder, options, addresses)) for kind in KINDS
                }
                rows += measure(swarm, models, local, options)
    show(rows)
    return rows


def measure(
    swarm: Swarm,
    models: dict[str, DistributedModelForCausalLM],
    local: Any,
    options: Options,
) -> list[dict[str, Any]]:
    clients = [_Client(kind, model, _prepare(model, kind, swarm)) for kind, model in models.items()]
    prompt = random_prompt(local, options.prompt_tokens, options.seed)
    expected = generate(local, prompt, options.new_tokens).tokens

    def request(model: DistributedModelForCausalLM) -> None:
        made = generate(model, prompt, options.new_tokens)
        assert made.tokens == expected, "tokens differ"

    for client in clients:
        with _version_of(client.kind):
            generate(client.model, prompt, 2)  # joins the swarm, touches all memory once
    rows = []
    # As many sessions as have one audited hop, in whole batches.
    per_audit = -(-round(1 / RATE) // len(swarm.nodes))
    for together in options.sessions:
        batches = -(-per_audit // together)
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        turns: list[dict[str, float]] = []
        for number in range(options.runs):
            sums: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
            for batch in range(batches):
                # In another order each time.
                first = (number + batch) % 3
                turns.append({})
                for client in [*clients[first:], *clients[:first]]:
                    used = _time_batch(swarm, client, request, together)
                    turns[-1][client.kind] = used["seconds"]
                    sums[client.kind].update(used)
            for kind, total in sums.items():
                rate = batches * together * options.new_tokens / total["seconds"]
                runs[kind].append({"tokens_per_s": rate, **total})
        rows.append(_summarize(swarm, together, batches * together, runs, turns))
        outcomes = {client.kind: dict(client.auditor.outcomes) for client in clients}
        assert all(set(found) <= {"passed"} for found in outcomes.values()), outcomes
    return rows


@dataclass(frozen=True, slots=True)
class _Client:
    kind: str
    model: DistributedModelForCausalLM
    auditor: Auditor


def _time_batch(
    swarm: Swarm,
    client: _Client,
    request: Callable[[DistributedModelForCausalLM], None],
    together: int,
) -> dict[str, Any]:
    """What as many requests at once take, until their audits have ended."""
    with _version_of(client.kind), _recomputed(client.auditor) as works:
        before, started = Usage.now(swarm.nodes), time.perf_counter()
        with ThreadPoolExecutor(together) as pool:
            for done in [pool.submit(request, client.model) for _ in range(together)]:
                done.result()
        while client.auditor._tasks:
            time.sleep(0.002)
        seconds = time.perf_counter() - started
        used = Usage.now(swarm.nodes).since(before)
    return {
        "seconds": seconds,
        "audits": len(works),
        "recomputed_tokens": sum(_tokens(work) for work in works),
        "recomputed_bytes": sum(_nbytes(work) for work in works),
        **{name: amount for name, amount in used.items() if amount is not None},
    }


def _prepare(model: DistributedModelForCausalLM, kind: str, swarm: Swarm) -> Auditor:
    """Have `model` audit as its `kind` does, and trust all nodes already."""
    model.join()
    connection: Any = model._ensure_connection()
    auditor: Auditor = connection._auditor
    auditor._rate = RATE if kind == "audits" else 0.0
    auditor._rng = EveryHundredth()
    auditor.history.passed = {PeerId(node.peer_id): 1000 for node in swarm.nodes}
    auditor.history._path = None
    return auditor


@contextmanager
def _version_of(kind: str) -> Iterator[None]:
    if kind == "no seals":
        with patch.object(hop_opening, "VERSION", BEFORE_SEALS):
            yield
    else:
        yield


@contextmanager
def _recomputed(auditor: Auditor) -> Iterator[list[HopWork]]:
    """The work that `auditor` computes again meanwhile."""
    works: list[HopWork] = []
    compute = auditor._compute_again

    async def compute_again(work: HopWork, *args: Any) -> Any:
        works.append(work)
        return await compute(work, *args)

    with patch.object(auditor, "_compute_again", compute_again):
        yield works


def _tokens(work: HopWork) -> int:
    return sum(len(row.inputs_LD) for row in work.rows)


def _nbytes(work: HopWork) -> int:
    """Of hidden states that the audit had beside what the client keeps for replay."""
    return sum(row.outputs_PD.nbytes + row.inputs_LD.nbytes for row in work.rows)


def _ratio(turns: Sequence[dict[str, float]], kind: str, seed: int) -> dict[str, float]:
    """Rate of `kind` to that without seals in all turns, and its 95 % interval."""
    seconds = np.array([[turn[KINDS[0]], turn[kind]] for turn in turns])
    drawn = np.random.default_rng(seed).integers(len(turns), size=(1000, len(turns)))
    sums = seconds[drawn].sum(1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], (2.5, 97.5))
    whole = seconds.sum(0)
    return {"ratio": whole[0] / whole[1], "low": low, "high": high}


def _summarize(
    swarm: Swarm,
    together: int,
    count: int,
    runs: dict[str, list[dict[str, Any]]],
    turns: Sequence[dict[str, float]],
) -> dict[str, Any]:
    rates = {kind: [one["tokens_per_s"] for one in of] for kind, of in runs.items()}
    last = runs["audits"]
    return {
        "nodes": len(swarm.nodes),
        "spans": swarm.spans,
        "sessions": together,
        "sessions_per_run": count,
        "tokens_per_s": {kind: median(of) for kind, of in rates.items()},
        "ratio_of_seals": _ratio(turns, "seals", together),
        "ratio_of_audits": _ratio(turns, "audits", together),
        "audits_per_run": median(one["audits"] for one in last),
        "recomputed_tokens": median(one["recomputed_tokens"] for one in last),
        "recomputed_bytes": median(one["recomputed_bytes"] for one in last),
        "runs": runs,
        "turns": turns,
    }


def _shown(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "What seals and audits of 1 % of hops cost",
        "sessions|no seals\ntokens/s|seals|audits|seals to none|audits to none|audits\nper run|"
        "recomputed\ntokens|MB",
        [
            [
                str(row["sessions"]),
                *(f"{row['tokens_per_s'][kind]:.1f}" for kind in KINDS),
                _shown(row["ratio_of_seals"]),
                _shown(row["ratio_of_audits"]),
                f"{row['audits_per_run']:.0f}",
                f"{row['recomputed_tokens']:.0f}",
                f"{row['recomputed_bytes'] / 1e6:.1f}",
            ]
            for row in rows
        ],
    )
