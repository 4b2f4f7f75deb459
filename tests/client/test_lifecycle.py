"""What a distributed model opens, it closes: after results, errors, interrupts and at the end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM, build_model
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.session.base import (
    BlockSession,
    RowSlice,
    SessionPrefix,
    SwarmConnection,
    Want,
)
from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import Span
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.routing.chains import Hop
from nesa_node.verification.distributions import ComputeLogits
from tests.client.local_models import local_model, random_ids


class ScriptedSession(BlockSession):
    """Passes hidden states through; `on_step` may fail or wait."""

    def __init__(self, rows: int, max_tokens: int, on_step: Callable[[], object]) -> None:
        self._lengths = [0] * rows
        self._max_tokens = max_tokens
        self._on_step = on_step
        self.events: list[str] = []

    @property
    def rows(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    @property
    def codecs(self) -> tuple[str, ...]:
        return ()

    @property
    def hops(self) -> tuple[Hop, ...]:
        return ()

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        self.events.append("step")
        waiting = self._on_step()
        if asyncio.iscoroutine(waiting):
            try:
                await waiting
            except asyncio.CancelledError:
                self.events.append("cancelled")
                raise
        for part in rows:
            self._lengths[part.row] += part.count
        if want == "all":
            return hidden_TD
        ends = itertools.accumulate(part.count for part in rows)
        return hidden_TD[[end - 1 for end in ends]]

    async def rollback(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    async def reorder(self, sources: Sequence[int]) -> None:
        self._lengths = [self._lengths[source] for source in sources]

    async def finish(self) -> None:
        """Nothing is audited; the connection closes it."""

    async def close(self) -> None:
        self.events.append("closed")


class ScriptedConnection(SwarmConnection):
    is_lost = False

    def __init__(self, on_step: Callable[[], object] = lambda: None) -> None:
        self.sessions: list[ScriptedSession] = []
        self.joined = 0
        self.left = 0
        self.left_before: list[int] = []
        """How often it had been left whenever it was joined."""
        self._on_step = on_step

    @asynccontextmanager
    async def connect(self, _: ComputeLogits) -> AsyncIterator[SwarmConnection]:
        self.joined += 1
        self.left_before.append(self.left)
        yield self
        self.left += 1

    @asynccontextmanager
    async def open_session(
        self,
        span: Span,
        *,
        rows: int,
        max_tokens: int,
        prefix: SessionPrefix | None = None,
        adapter: bytes = b"",
    ) -> AsyncIterator[BlockSession]:
        session = ScriptedSession(rows, max_tokens, self._on_step)
        self.sessions.append(session)
        try:
            yield session
        finally:
            await session.close()


def scripted_model(folder: Path, connection: ScriptedConnection) -> DistributedModelForCausalLM:
    return build_model(open_checkpoint(str(folder), cache_dir=folder), connection.connect)


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("nesa")]


def test_the_swarm_is_joined_once_and_only_when_needed(tiny: Callable[[str], Path]) -> None:
    connection = ScriptedConnection()
    with scripted_model(tiny("llama"), connection) as model:
        assert connection.joined == 0
        assert client_threads() == []
        for _ in range(2):
            model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False)
        assert connection.joined == 1
        assert [session.events[-1] for session in connection.sessions] == ["closed"] * 2
        assert connection.left == 0
    assert connection.left == 1
    assert client_threads() == []


def test_a_lost_connection_is_left_before_the_swarm_is_joined_anew(
    tiny: Callable[[str], Path],
) -> None:
    connection = ScriptedConnection()
    with scripted_model(tiny("llama"), connection) as model:
        model.join()
        assert "the swarm is joined with the first session" not in repr(model)
        connection.is_lost = True
        assert "the swarm is joined with the first session" in repr(model)
        model.join()
        assert (connection.left_before, connection.left) == ([0, 1], 1)
        connection.is_lost = False
        model.join()
        assert connection.joined == 2


def test_the_session_promises_prompt_and_new_tokens(tiny: Callable[[str], Path]) -> None:
    connection = ScriptedConnection()
    with scripted_model(tiny("llama"), connection) as model:
        model.generate(random_ids(2, 7), max_new_tokens=5, do_sample=False)
        model.generate(random_ids(1, 7), max_new_tokens=5, do_sample=True, num_return_sequences=3)
    assert [(s.rows, s.max_tokens) for s in connection.sessions] == [(2, 12), (3, 12)]


def test_an_error_of_a_step_reaches_the_caller_and_closes_the_session(
    tiny: Callable[[str], Path],
) -> None:
    def fail() -> None:
        raise MissingBlocksError([(2, 4)], "no node holds blocks 2:4")

    connection = ScriptedConnection(fail)
    with scripted_model(tiny("llama"), connection) as model:
        with pytest.raises(MissingBlocksError, match="2:4"):
            model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False)
        assert connection.sessions[0].events == ["step", "closed"]
        session = model.inference_session(max_length=8)
        with pytest.raises(MissingBlocksError):
            session.step(random_ids(1, 4))
        assert session.closed


def test_an_interrupt_cancels_the_step_and_closes_the_session(
    tiny: Callable[[str], Path],
) -> None:
    running = threading.Event()

    async def forever() -> None:
        running.set()
        await asyncio.sleep(60)

    def interrupt() -> None:
        running.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    connection = ScriptedConnection(forever)
    with scripted_model(tiny("llama"), connection) as model:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False)
        thread.join()
        assert connection.sessions[0].events == ["step", "cancelled", "closed"]


def test_sessions_left_open_are_closed_with_the_model(tiny: Callable[[str], Path]) -> None:
    connection = ScriptedConnection()
    model = scripted_model(tiny("llama"), connection)
    session = model.inference_session(max_length=8)
    session.step(random_ids(1, 4))
    model.close()
    model.close()
    assert connection.sessions[0].events == ["step", "closed"]
    assert connection.left == 1
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        model.inference_session(max_length=8)


def test_a_connection_that_failed_is_made_again(tiny: Callable[[str], Path]) -> None:
    connection = ScriptedConnection()
    broken = asyncio.Event()

    @asynccontextmanager
    async def connect(_: ComputeLogits) -> AsyncIterator[SwarmConnection]:
        async def watch() -> None:
            await broken.wait()
            raise OSError("the daemon died")

        async with asyncio.TaskGroup() as group, connection.connect(torch.relu):
            task = group.create_task(watch())
            yield connection
            task.cancel()

    async def set_broken() -> None:
        broken.set()

    checkpoint = open_checkpoint(str(tiny("llama")), cache_dir=tiny("llama"))
    with build_model(checkpoint, connect) as model:
        model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False)
        first = model._connection
        assert first is not None
        model._loop.run(set_broken())
        while first.is_alive:
            time.sleep(0.01)
        broken.clear()
        model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False)
        assert connection.joined == 2


def test_a_model_that_nobody_refers_to_ends_its_thread(tiny: Callable[[str], Path]) -> None:
    connection = ScriptedConnection()
    model = scripted_model(tiny("llama"), connection)
    model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False)
    del model
    gc.collect()
    assert connection.left == 1
    assert client_threads() == []


def test_client_blocks_end_their_thread_with_the_model(tiny: Callable[[str], Path]) -> None:
    with local_model(tiny("llama"), client_blocks=(1, 1)) as model:
        model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False)
    assert client_threads() == []


def test_a_whole_model_kept_by_the_client_needs_no_swarm(tiny: Callable[[str], Path]) -> None:
    with AutoDistributedModelForCausalLM.from_pretrained(
        tiny("llama"), client_blocks=(6, 0)
    ) as model:
        assert model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False).shape == (1, 6)
        assert model._connection is None
