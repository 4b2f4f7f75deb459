"""Machines follow the load from one swarm to another, and no session fails meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.models import save_random_llama
from nesa_node import AutoDistributedModelForCausalLM
from tests.engine.tiny_models import greedy, reference
from tests.pool.machines import Pool, open_pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FIRST, SECOND = "first", "org/second"
MACHINES = 3
MACHINE_BYTES = 300e6
"""Room for one of the models with its cache, not for both."""
PROMPT_TOKENS, CLIENTS = 1024, 3
PATIENCE_S = 240.0


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """Of one test: what machines start during a test has to end with it."""
    folder = tmp_path
    for seed, model in enumerate((FIRST, SECOND)):
        target = folder / "cache" / model
        target.mkdir(parents=True)
        save_random_llama(target, "50m", dtype=torch.float32, seed=seed)
    share = f"{MACHINE_BYTES / psutil.virtual_memory().total:.9f}"
    with open_pool(folder, [("--pool-memory-share", share)] * MACHINES) as pool:
        for model in (FIRST, SECOND):
            built = pool.swarm("create", model, "--replicas", "1:2")
            assert built.returncode == 0, built.stderr
        yield pool


@contextmanager
def sessions(pool: Pool, model: str, prompt_tokens: int, new_tokens: int) -> Iterator[list[int]]:
    """One client's sessions, one after the other, each compared with transformers.

    Yields the number of tokens of each session that ended. Raises what ended a session.
    """
    folder, ended, done, failed = pool.cache_dir / model, threading.Event(), [], []
    alone = reference(folder)

    def run() -> None:
        try:
            with AutoDistributedModelForCausalLM.from_pretrained(
                folder, initial_peers=pool.addresses, dtype=torch.float32
            ) as client:
                for seed in count():
                    if ended.is_set():
                        return
                    generator = torch.Generator().manual_seed(seed)
                    prompt = torch.randint(0, 320, (prompt_tokens,), generator=generator).tolist()
                    found = greedy(client, prompt, new_tokens)
                    assert found == greedy(alone, prompt, new_tokens)
                    done.append(len(found))
        except BaseException as error:  # any: it is raised again in the test's thread
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]


@contextmanager
def loaded(pool: Pool, model: str) -> Iterator[None]:
    """Several clients whose long prompts keep the model's nodes busy."""
    ended = threading.Event()

    def run(number: int) -> None:
        with AutoDistributedModelForCausalLM.from_pretrained(
            pool.cache_dir / model, initial_peers=pool.addresses, dtype=torch.float32
        ) as client:
            for seed in count():
                if ended.is_set():
                    return
                generator = torch.Generator().manual_seed(1000 * number + seed)
                prompt = torch.randint(0, 320, (PROMPT_TOKENS,), generator=generator).tolist()
                greedy(client, prompt, 1)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_the_spare_machine_follows_the_load_and_no_session_fails(pool: Pool) -> None:
    with sessions(pool, FIRST, 8, 24) as done:
        pool.wait(lambda: done, PATIENCE_S, "a first session")
        with loaded(pool, FIRST):
            pool.wait(
                lambda: len(pool.held(FIRST, "serving")) == 2, PATIENCE_S, "a replica of the first"
            )
        before = len(done)
        with loaded(pool, SECOND):
            pool.wait(
                lambda: len(pool.held(SECOND, "serving")) == 2,
                PATIENCE_S,
                "a replica of the second on the first's machine",
            )
        assert len(pool.held(FIRST, "serving")) == 1
        pool.wait(lambda: len(done) > before + 1, PATIENCE_S, "sessions after the move")
        assert pool.swarm("remove", SECOND).returncode == 0
        states = ("loading", "serving", "leaving")
        pool.wait(
            lambda: not any(pool.held(SECOND, each) for each in states), PATIENCE_S, "release"
        )
        after = len(done)
        pool.wait(lambda: len(done) > after + 1, PATIENCE_S, "sessions after the removal")
    print(f"{len(done)} sessions, {sum(done)} tokens, all equal to transformers'")
