"""Adapters in a node's memory: which are kept, and which make room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nesa_node.core.errors import AdapterError, BusyError, ProtocolError
from nesa_node.core.ids import Span
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks
from nesa_node.server.adapters.loaded_adapters import LoadedAdapters
from tests.e2e.test_adapters import make_adapter
from tests.engine.chained import open_local
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS

pytestmark = PEFT_WARNINGS
NAMES = ("aa", "bb", "cc")


class Source:
    """Folders by digest, in place of a node's store; counts how often each is read."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders
        self.read: list[str] = []

    async def open_digest(self, digest: str) -> Path:
        self.read.append(digest)
        if digest not in self.folders:
            raise AdapterError(f"no adapter {digest}")
        return self.folders[digest]


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def blocks(folder: Path) -> ModelBlocks:
    return load_blocks(open_local(folder), Span(0, 2), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def source(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    target = tmp_path_factory.mktemp("adapters")
    return Source({name: make_adapter(folder, target / name, at) for at, name in enumerate(NAMES)})


def make(blocks: ModelBlocks, source: Source, room_for: float) -> LoadedAdapters:
    source.read.clear()
    nbytes = blocks.load_adapter(source.folders["aa"]).nbytes
    server: Any = SimpleNamespace(open_digest=source.open_digest)
    return LoadedAdapters(blocks, server, int(room_for * nbytes))


async def test_those_in_use_stay_and_the_others_make_room(
    blocks: ModelBlocks, source: Source
) -> None:
    adapters = make(blocks, source, 2.5)
    async with adapters.using(bytes.fromhex("aa")) as first:
        async with adapters.using(bytes.fromhex("bb")):
            with pytest.raises(BusyError, match="use all of the memory"):
                async with adapters.using(bytes.fromhex("cc")):
                    pass
        async with (
            adapters.using(bytes.fromhex("cc")),
            adapters.using(bytes.fromhex("aa")) as again,
        ):
            assert again is first
    async with adapters.using(bytes.fromhex("bb")):
        pass
    assert source.read == ["aa", "bb", "cc", "cc", "bb"]


async def test_sessions_that_begin_together_share_one_reading(
    blocks: ModelBlocks, source: Source
) -> None:
    adapters = make(blocks, source, 2)
    async with AsyncExitStack() as stack:
        found = await asyncio.gather(
            *(stack.enter_async_context(adapters.using(bytes.fromhex("aa"))) for _ in range(4))
        )
    assert len({id(each) for each in found}) == 1
    assert source.read == ["aa"]


async def test_what_is_unknown_or_too_large_is_refused_by_name(
    blocks: ModelBlocks, source: Source
) -> None:
    adapters = make(blocks, source, 0.5)
    for digest, code in (("aa", "adapter_too_large"), ("dd", "unknown_adapter")):
        with pytest.raises(ProtocolError) as refused:
            async with adapters.using(bytes.fromhex(digest)):
                pass
        assert refused.value.code == code
    async with adapters.using(b"") as none:
        assert none is None
