"""A busy machine costs no session its node: nothing fails here, and everything is slow."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.metrics import FAILOVERS, SUSPICIONS, Metric
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS, POSITIONS
from tests.faults.bed import Bed
from tests.faults.runs import ROUTES, generate, join_bed
from tests.faults.test_endurance import DURATION_S, NEW_TOKENS
from tests.same_tokens import ReferenceRun, assert_same_as, run_reference
from tests.swarms import thirds

COLUMNS = (5, 60, POSITIONS // 2)
"""Of the prompts: the last is one that other sessions wait for."""
CLIENTS = 2
"""For each route."""


def _spin() -> None:
    while True:
        pass


@contextmanager
def _busy_machine() -> Iterator[None]:
    """Every core has something else to do, too."""
    context = multiprocessing.get_context("spawn")
    spinning = [context.Process(target=_spin, daemon=True) for _ in range(psutil.cpu_count() or 1)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def _work(
    model: DistributedModelForCausalLM, runs: Sequence[ReferenceRun], seed: int, until: float
) -> int:
    """Generate one text after another; returns how many, all with equal tokens."""
    rng, count = random.Random(seed), 0
    while time.monotonic() < until:
        run = rng.choice(runs)
        with model.inference_session(POSITIONS) as session:
            output_BL = generate(model, run.input_ids_BL, session, new_tokens=NEW_TOKENS)
        assert_same_as(run, output_BL)
        count += 1
    return count


def _counted(models: Sequence[DistributedModelForCausalLM], metric: Metric) -> Counter[str]:
    found: Counter[str] = Counter()
    for model in models:
        for sample in model.samples():
            if sample.metric is metric:
                assert isinstance(sample.value, int | float)
                found[sample.labels[-1]] += int(sample.value)
    return found


@pytest.mark.slow
@pytest.mark.timeout(DURATION_S + 300)
def test_busy_machine_costs_no_session_its_node(alone: PreTrainedModel, bed: Bed) -> None:
    """Every span has a second node, which would take over at once."""
    runs = [
        run_reference(
            alone,
            ids_BL := random_ids(1, columns, seed=columns),
            torch.ones_like(ids_BL),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        for columns in COLUMNS
    ]
    bed.start([*thirds(BLOCKS), *thirds(BLOCKS)])
    with ExitStack() as stack:
        models = [stack.enter_context(join_bed(bed, routing)) for routing in ROUTES * CLIENTS]
        threads = stack.enter_context(ThreadPoolExecutor(len(models)))
        stack.enter_context(_busy_machine())
        until = time.monotonic() + DURATION_S
        working = [
            threads.submit(_work, model, runs, seed, until) for seed, model in enumerate(models)
        ]
        texts = sum(each.result() for each in working)
        suspicions = _counted(models, SUSPICIONS)
        failovers = _counted(models, FAILOVERS)
    load = psutil.getloadavg()
    print(f"{texts} texts with equal tokens, suspicions {dict(suspicions)}, load {load}")
    assert suspicions["confirmed"] == 0
    assert failovers["failed"] == 0
    assert suspicions["raised"] == suspicions["withdrawn"]
