"""What seals and audits cost: tokens/s without seals, with seals, and with 1 % of hops audited.

Sessions of one client, alone and sixteen at once, over the same daemons; the three kinds
take turns in each run. Of every hundred hops of the third kind exactly one is audited, so that runs
do not differ by chance; the client computes it again from its own weights, on the same machine.
Daemons hash nothing for a client that speaks a version before seals.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.figures import median_ratio
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

DEFAULTS = Options(nodes=(3,), sessions=(1, 16), threads=(1,))
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
    auditors = {kind: _prepare(models[kind], kind, swarm) for kind in KINDS}
    prompt = random_prompt(local, options.prompt_tokens, options.seed)
    expected = generate(local, prompt, options.new_tokens).tokens
    for kind, model in models.items():
        with _version_of(kind):
            generate(model, prompt, 2)  # joins the swarm, touches all memory once
    rows = []
    # As many sessions as have one audited hop, in whole batches.
    per_audit = -(-round(1 / RATE) // len(swarm.nodes))
    for together in options.sessions:
        count = -(-per_audit // together) * together
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for number in range(options.runs):
            # In another order each time.
            for kind in [*KINDS[number % 3 :], *KINDS[: number % 3]]:
                with _version_of(kind), _recomputed(auditors[kind]) as works:
                    before, started = Usage.now(swarm.nodes), time.perf_counter()
                    with ThreadPoolExecutor(together) as pool:
                        made = list(
                            pool.map(
                                lambda _, model=models[kind]: generate(
                                    model, prompt, options.new_tokens
                                ),
                                range(count),
                            )
                        )
                    seconds = time.perf_counter() - started
                    used = Usage.now(swarm.nodes).since(before)
                assert all(each.tokens == expected for each in made), "tokens differ"
                runs[kind].append(
                    {
                        "seconds": seconds,
                        "tokens_per_s": count * options.new_tokens / seconds,
                        "audits": len(works),
                        "recomputed_tokens": sum(_tokens(work) for work in works),
                        "recomputed_bytes": sum(_nbytes(work) for work in works),
                        **used,
                    }
                )
        rows.append(_summarize(swarm, together, count, runs))
        outcomes = {kind: dict(auditors[kind].outcomes) for kind in KINDS}
        assert all(set(found) <= {"passed"} for found in outcomes.values()), outcomes
    return rows


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


def _summarize(
    swarm: Swarm, together: int, count: int, runs: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    rates = {kind: [one["tokens_per_s"] for one in of] for kind, of in runs.items()}
    last = runs["audits"]
    return {
        "nodes": len(swarm.nodes),
        "spans": swarm.spans,
        "sessions": together,
        "sessions_per_run": count,
        "tokens_per_s": {kind: median(of) for kind, of in rates.items()},
        "ratio_of_seals": median_ratio(rates["seals"], rates["no seals"]),
        "ratio_of_audits": median_ratio(rates["audits"], rates["no seals"]),
        "audits_per_run": median(one["audits"] for one in last),
        "recomputed_tokens": median(one["recomputed_tokens"] for one in last),
        "recomputed_bytes": median(one["recomputed_bytes"] for one in last),
        "runs": runs,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "What seals and audits of 1 % of hops cost",
        "sessions|no seals\ntokens/s|seals|audits|seals to none|audits to none|audits\nper run|"
        "recomputed\ntokens|MB",
        [
            [
                str(row["sessions"]),
                *(f"{row['tokens_per_s'][kind]:.1f}" for kind in KINDS),
                f"{row['ratio_of_seals']:.3f}",
                f"{row['ratio_of_audits']:.3f}",
                f"{row['audits_per_run']:.0f}",
                f"{row['recomputed_tokens']:.0f}",
                f"{row['recomputed_bytes'] / 1e6:.1f}",
            ]
            for row in rows
        ],
    )
