"""Encoded weights beyond the memory for them: in a file, with the same products."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nesa_node.core.errors import DiskLimitError, InsufficientMemoryError
from nesa_node.core.ids import Span
from nesa_node.core.settings.declaration import default_cache_dir
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.engine.weights.demo_model import demo_model_path
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.ring import Residues, Ring
from nesa_node.server.private.encoded_blocks import EncodedBlocks, IntegerBlocks, PrivateBlocks
from tests.engine.tiny_models import save_tiny_model

RING = make_ring(RingParameters())
SPAN = Span(1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models"))


def residues(rng: np.random.Generator, ring: Ring, *shape: int) -> Residues:
    """Numbers [*shape, P, N] below each prime."""
    primes = ring.primes[: shape[-1]]
    drawn = [rng.integers(0, each, (*shape[:-1], ring.degree)) for each in primes]
    return np.stack(drawn, axis=-2).astype(np.uint32)


def products(blocks: PrivateBlocks) -> dict[str, bytes]:
    """Of each layer, with the same vectors under the same keys."""
    rng, primes = np.random.default_rng(0), len(RING.primes)
    keys = {step: residues(rng, RING, primes - 1, 2, primes) for step in blocks.rotations}
    found = {}
    for path in blocks._products:
        chunks = [residues(rng, RING, 2, primes - 1) for _ in range(blocks.chunks(path))]
        found[path] = blocks.multiply(path, chunks, keys)
    return found


@pytest.mark.parametrize("kind", [EncodedBlocks, IntegerBlocks])
def test_what_does_not_fit_into_memory_is_mapped(
    kind: type[PrivateBlocks], folder: Path, tmp_path: Path
) -> None:
    found = []
    for part in (None, 0.5, 0):
        blocks = kind(RING, open_folder(folder), SPAN)
        spare = blocks.nbytes - blocks.resident_bytes
        limit = None if part is None else blocks.resident_bytes + int(spare * part)
        store = blocks.open_store(tmp_path, limit)
        blocks.encode(store)
        in_memory = blocks.nbytes - store.mapped_bytes
        assert limit is None or blocks.resident_bytes <= in_memory <= limit
        assert bool(store.mapped_bytes) == (part is not None)
        assert bool(in_memory - blocks.resident_bytes) == (part != 0)
        found.append(products(blocks))
    assert found[0] == found[1] == found[2]
    assert not list(tmp_path.iterdir())


def test_integers_stay_in_memory(folder: Path, tmp_path: Path) -> None:
    blocks = IntegerBlocks(RING, open_folder(folder), SPAN)
    with pytest.raises(InsufficientMemoryError, match="--private-cache-gib"):
        blocks.open_store(tmp_path, blocks.resident_bytes - 1)


def test_a_full_disk_is_told_before_anything_is_encoded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = EncodedBlocks(RING, open_folder(folder), SPAN)
    free = SimpleNamespace(free=blocks.nbytes // 2 - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(DiskLimitError, match=r"serve fewer blocks \(--num-blocks\), raise"):
        blocks.open_store(tmp_path, blocks.nbytes // 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_limit_holds_for_the_memory_of_a_process(tmp_path: Path) -> None:
    """Four blocks of the demo model take some 300 MiB encoded."""
    demo = demo_model_path(default_cache_dir())
    code = f"""
from pathlib import Path
from nesa_node.core.ids import Span
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.server.private.encoded_blocks import EncodedBlocks
from tests.server.private.test_encoded_blocks import RING

def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10

blocks = EncodedBlocks(RING, open_folder(Path({str(demo)!r})), Span(0, 4))
before = memory()
blocks.encode(blocks.open_store(Path({str(tmp_path)!r}), LIMIT))
print(blocks.nbytes >> 20, memory() - before)
"""
    grown = []
    for limit in ("None", "64 << 20"):
        argv = [sys.executable, "-c", code.replace("LIMIT", limit)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=250, check=True)
        total, used = map(int, done.stdout.split())
        grown.append(used)
    assert total > 256
    assert grown[0] > total * 0.95
    assert grown[1] < 64 + 96, "the weights of a layer are read at once, and encoded in parts"
