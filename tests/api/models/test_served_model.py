"""Whoever goes away leaves nothing on the nodes, in whatever state the session was."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.api.generation.grammar import json_schema_grammar
from nesa_node.api.generation.job import Delta, Job, PrefillDone
from nesa_node.api.models.served_model import ServedModel, open_served_model
from nesa_node.api.processes.workers import FairThreadPool
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.core.errors import (
    ContextLengthError,
    MissingBlocksError,
    SwarmError,
    UnsupportedModelError,
)
from nesa_node.core.ids import Span
from nesa_node.core.settings.models import ClientConfig
from nesa_node.engine.cache.pages import PAGE_TOKENS
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.web.authenticator import caller_context
from nesa_node.web.problem import HttpProblem
from tests.api.served import answer, greedy_job, outcome, served_locally, serving
from tests.cli.tiny import write_tiny_model
from tests.engine.tiny_models import BLOCKS, greedy, prompt_ids, reference
from tests.joining_node import joining
from tests.nodes_seen import NodesSeen
from tests.swarms import in_process_swarm, thirds

FREE_WITHIN_S = 1.0
_WAIT_S = 45.0


@asynccontextmanager
async def swarm(
    folder: Path,
    tmp_path: Path,
    *,
    nodes: int = 3,
    joins: Span | None = None,
    recovery_s: float = 30,
    **options: Any,
) -> AsyncIterator[ServedModel]:
    """Nodes in this process, and a served model that uses them.

    One more announces that it is about to serve `joins`.
    """
    context = in_process_swarm(folder, thirds(BLOCKS)[:nodes], tmp_path, **options)
    addresses = await asyncio.to_thread(context.__enter__)
    coming: AbstractContextManager[object] = (
        nullcontext() if joins is None else joining(addresses, joins)
    )
    await asyncio.to_thread(coming.__enter__)
    try:
        model = AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32, recovery_timeout_s=recovery_s
        )
        async with serving(model) as served:
            await served.join()
            yield served
    finally:
        await asyncio.to_thread(coming.__exit__, None, None, None)
        await asyncio.to_thread(context.__exit__, None, None, None)


async def until(state: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not state():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def read_for_ever(served: ServedModel, job: Job, seen: list[object]) -> None:
    async with served.generate(job) as events:
        async for event in events:
            seen += [event]


async def test_a_session_between_two_tokens_ends(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = NodesSeen(monkeypatch)
    async with swarm(tiny("llama"), tmp_path) as served:
        async with served.generate(greedy_job(prompt_ids(8), 900)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
            assert nodes.sessions == [1, 1, 1]
        await asyncio.to_thread(nodes.wait_until_free, FREE_WITHIN_S)
        await until(lambda: not served.activity.sessions())


async def test_a_session_in_a_long_prefill_ends(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, steps = NodesSeen(monkeypatch), []
    forward = ModelBlocks._forward

    def slowly(*args: Any, **options: Any) -> torch.Tensor:
        steps.append(0)
        time.sleep(0.2)
        return forward(*args, **options)

    async with swarm(tiny("llama"), tmp_path) as served:
        monkeypatch.setattr(ModelBlocks, "_forward", slowly)
        seen: list[object] = []
        job = greedy_job(prompt_ids(1000), 8)
        task = asyncio.create_task(read_for_ever(served, job, seen))
        # A node may be measuring itself, too.
        await until(lambda: [one.state for one in served.activity.sessions()] == ["prefill"])
        before = len(steps)
        await until(lambda: len(steps) > before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(nodes.wait_until_free, FREE_WITHIN_S)
        assert seen == []


async def test_a_session_that_waits_for_room_ends(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, released, run = NodesSeen(monkeypatch), threading.Event(), ModelBlocks.forward_buffers

    def held(*args: Any, **options: Any) -> Any:
        released.wait(0.1)
        return run(*args, **options)

    # Else whoever has the room could have left it again before the second asks.
    monkeypatch.setattr(ModelBlocks, "forward_buffers", held)
    async with swarm(tiny("llama"), tmp_path, attn_cache_tokens=4 * PAGE_TOKENS) as served:
        holder: list[object] = []
        job = greedy_job(prompt_ids(8), 4 * PAGE_TOKENS - 8)
        async with served.generate(job) as first:
            holder.append(await anext(first))
            task = asyncio.create_task(read_for_ever(served, job, []))
            await until(lambda: len(served.activity.sessions()) == 2)
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: len(served.activity.sessions()) == 1)
            released.set()
        await asyncio.to_thread(nodes.wait_until_free, FREE_WITHIN_S)
        assert isinstance(holder[0], PrefillDone)
        # The room can be had again.
        assert len((await answer(served, job)).tokens) == job.max_tokens


async def test_a_session_that_waits_for_missing_blocks_ends(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = NodesSeen(monkeypatch)
    async with swarm(tiny("llama"), tmp_path, nodes=2, joins=thirds(BLOCKS)[2]) as served:
        task = asyncio.create_task(read_for_ever(served, greedy_job(prompt_ids(8), 4), []))
        await until(lambda: [one.state for one in served.activity.sessions()] == ["waiting"])
        await asyncio.sleep(0.5)
        task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not served.activity.sessions())
        assert time.monotonic() - began < FREE_WITHIN_S
        await asyncio.to_thread(nodes.wait_until_free, FREE_WITHIN_S)


@pytest.mark.parametrize(
    "clients", [16, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
async def test_many_that_leave_at_once_leave_nothing(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clients: int
) -> None:
    nodes = NodesSeen(monkeypatch)
    # Fewer than there are clients: some are between tokens, some wait.
    tokens = clients * 512
    room: Any = {"attn_cache_tokens": tokens, "max_cache_tokens_per_peer": tokens}
    async with swarm(tiny("llama"), tmp_path, max_sessions_per_peer=clients // 2, **room) as served:
        served._threads = FairThreadPool(clients, max_per_caller=clients, name="nesa-request")
        seen: list[list[object]] = [[] for _ in range(clients)]
        tasks = [
            asyncio.create_task(
                read_for_ever(served, greedy_job(prompt_ids(8 + one % 5, seed=one), 900), seen[one])
            )
            for one in range(clients)
        ]
        await until(lambda: sum(len(events) > 2 for events in seen) >= clients // 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(nodes.wait_until_free, FREE_WITHIN_S)
        await until(lambda: not served.activity.sessions())
        prompt = prompt_ids(20)
        made = await answer(served, greedy_job(prompt, 8))
    assert made.token_ids == greedy(reference(tiny("llama")), prompt, 8)


async def test_what_nodes_hold_of_a_prompt_is_told(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    prompt = prompt_ids(3 * PAGE_TOKENS)
    async with swarm(tiny("llama"), tmp_path) as served:
        first = await outcome(served, greedy_job(prompt, 4))
        await until(lambda: not served.activity.sessions())
        again = await outcome(served, greedy_job(prompt, 4, n=2))
    assert first.read.cached_tokens == 0
    assert again.read.cached_tokens >= 2 * PAGE_TOKENS
    assert [one.token_ids for one in again.answers] == [first.answers[0].token_ids] * 2


async def test_keys_share_no_prompts(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    prompt = prompt_ids(3 * PAGE_TOKENS)
    held = []
    async with swarm(tiny("llama"), tmp_path) as served:
        for key in ("alice", "bob", "", "alice", "bob", ""):
            made = await outcome(served, greedy_job(prompt, 2, prefix_scope=key))
            held.append(made.read.cached_tokens)
            await until(lambda: not served.activity.sessions())
    assert held[:3] == [0, 0, 0]
    assert min(held[3:]) >= 2 * PAGE_TOKENS


async def test_blocks_that_nobody_holds_are_named(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    async with swarm(tiny("llama"), tmp_path, nodes=2, recovery_s=1) as served:
        with pytest.raises(MissingBlocksError) as raised:
            await answer(served, greedy_job(prompt_ids(8), 4))
    assert raised.value.missing == ((4, 6),)


async def test_too_many_requests_are_refused(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nesa_node.api.models.served_model.MAX_REQUESTS", 1)
    async with served_locally(tiny("llama")) as served:
        async with served.generate(greedy_job(prompt_ids(4), 900)) as events:
            await anext(events)
            with pytest.raises(HttpProblem, match="1 more requests"):
                await answer(served, greedy_job(prompt_ids(4), 1))
        await until(lambda: not served.activity.sessions())
        await answer(served, greedy_job(prompt_ids(4), 1))


async def test_a_key_that_asks_for_all_leaves_requests_and_threads_to_another(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nesa_node.api.models.served_model.MAX_REQUESTS", 16)
    async with served_locally(tiny("llama")) as served, AsyncExitStack() as stack:
        with caller_context("a"):
            for _ in range(16):
                asked = served.generate(greedy_job(prompt_ids(4), 900))
                await stack.enter_async_context(asked)
        await until(lambda: len(served.activity.sessions()) >= 6)
        with caller_context("b"):
            assert (await answer(served, greedy_job(prompt_ids(4), 1))).token_ids
        # Six of the first key, and perhaps one that is about to end.
        assert len(served.activity.sessions()) <= 7
        with caller_context("a"), pytest.raises(HttpProblem) as refused:
            await answer(served, greedy_job(prompt_ids(4), 1))
        assert refused.value.status == 429
        await stack.aclose()
        await until(lambda: not served.activity.sessions())
        with caller_context("a"):
            await answer(served, greedy_job(prompt_ids(4), 1))


async def test_an_error_that_is_not_read_does_not_stay(tiny: Callable[[str], Path]) -> None:
    def errors() -> int:
        return sum(type(found) is ContextLengthError for found in gc.get_objects())

    gc.disable()
    try:
        async with served_locally(tiny("llama")) as served:
            async with served.generate(greedy_job(prompt_ids(4), 1_000_000)):
                await until(lambda: errors() > 0)
            await until(lambda: errors() == 0)
    finally:
        gc.enable()


async def test_closing_ends_what_still_runs(tiny: Callable[[str], Path]) -> None:
    async with served_locally(tiny("llama")) as served:
        async with served.generate(greedy_job(prompt_ids(4), 900)) as events:
            await anext(events)
            await served.close()
            # Not just an end: it would be taken for the answer's.
            with pytest.raises(SwarmError, match="closed"):
                async for _ in events:
                    pass
        assert not served.activity.sessions()


async def test_a_folder_is_opened_with_its_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "words")
    config = ClientConfig(torch_dtype="float32", cache_dir=tmp_path)
    served = await asyncio.to_thread(open_served_model, config, open_folder(folder))
    try:
        assert (served.name, served.vocab_size, served.context_length) == ("words", 64, 512)
        assert served.model_id.startswith("words@")
        assert served.vocabulary.eos_ids == {0}
        assert abs(served.created - time.time()) < 60
        # llguidance does not know a tokenizer of whole words.
        with pytest.raises(ValueError, match="tokenizer"):
            served.vocabulary.grammars.compile(json_schema_grammar({"type": "object"}))
    finally:
        await served.close()
        await served.close()


async def test_a_tokenizer_of_a_discovered_model_is_checked(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "words")
    config = ClientConfig(torch_dtype="float32", cache_dir=tmp_path)
    served = await asyncio.to_thread(
        open_served_model, config, open_folder(folder), discovered=True
    )
    await served.close()
    doubles = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": doubles}))
    with pytest.raises(UnsupportedModelError, match="--model"):
        await asyncio.to_thread(open_served_model, config, open_folder(folder), discovered=True)
    # Named, it is trusted.
    served = await asyncio.to_thread(open_served_model, config, open_folder(folder))
    await served.close()


async def test_a_closed_model_takes_no_more_requests(tiny: Callable[[str], Path]) -> None:
    async with served_locally(tiny("llama")) as served:
        await served.close()
        with pytest.raises(SwarmError, match="ask again"):
            await answer(served, greedy_job(prompt_ids(4), 1))
        with pytest.raises(SwarmError, match="ask again"):
            await served.embed([prompt_ids(4)])
        assert served._metrics._models == {}
