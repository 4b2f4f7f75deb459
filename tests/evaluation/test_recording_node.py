"""Recording nodes end with their swarm, and what ends them otherwise is raised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import Span
from nesa_node.core.settings.models import NodeConfig
from nesa_node.evaluation import recording_node
from nesa_node.evaluation.recording_node import recording_swarm

SPANS = [Span(0, 1), Span(1, 2)]

StopNode = Callable[[], Awaitable[None]]


@pytest.fixture
def stop_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[StopNode], None]:
    """Put nodes in place of real ones that do nothing, and at the end what the test gives."""

    def use(stop: StopNode) -> None:
        async def serve(config: NodeConfig, stopping: asyncio.Event) -> None:
            assert config.ready_file is not None
            # Renamed, so that it is never read half.
            written = config.ready_file.with_suffix(".part")
            written.write_text('{"addresses": []}')
            written.replace(config.ready_file)
            await stopping.wait()
            await stop()

        monkeypatch.setattr(recording_node, "serve_node", serve)
        monkeypatch.setattr(recording_node, "_STOP_S", 0.5)

    return use


async def end() -> None: ...


async def fail() -> None:
    raise SwarmError("lost at the end")


async def cancel() -> None:
    raise asyncio.CancelledError


async def hang() -> None:
    await asyncio.sleep(600)


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "recording-nodes"]


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (end, None),
        (fail, "lost at the end"),
        (hang, "recording node 0 does not stop within"),
        (cancel, "recording node 0 was cancelled"),
    ],
)
def test_nodes_and_thread_end_and_errors_are_told(
    stop: StopNode,
    message: str | None,
    stop_with: Callable[[StopNode], None],
    tmp_path: Path,
) -> None:
    stop_with(stop)
    opened = recording_swarm(tmp_path, SPANS, tmp_path)
    assert len(opened.__enter__()) == 2
    assert threads()
    if message is None:
        assert not opened.__exit__(None, None, None)
    else:
        with pytest.raises(SwarmError, match=message):
            opened.__exit__(None, None, None)
    assert not threads()


@pytest.mark.parametrize("stop", [end, fail, hang, cancel])
def test_the_error_of_the_caller_goes_first(
    stop: StopNode, stop_with: Callable[[StopNode], None], tmp_path: Path
) -> None:
    stop_with(stop)
    with pytest.raises(KeyError, match="of the caller"), recording_swarm(tmp_path, SPANS, tmp_path):
        raise KeyError("of the caller")
    assert not threads()
