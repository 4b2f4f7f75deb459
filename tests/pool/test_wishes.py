"""Wishes that cannot be built are refused in one line that says why, and cost nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nesa_node.swarm.p2p.identity import Identity
from tests.engine.fake_hub import FakeHub, fake_hub
from tests.pool.machines import Pool, open_pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FORBIDDEN, ABSENT, LARGE = "forbidden", "org/absent", "org/tiny"


@pytest.fixture(scope="module")
def hub(tiny: Callable[[str], Path]) -> Iterator[FakeHub]:
    with fake_hub(tiny("llama")) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


@pytest.fixture
def pool(tmp_path: Path, hub: FakeHub, tiny: Callable[[str], Path]) -> Iterator[Pool]:
    """A machine that holds nothing but models of `org`, with 0.1 MB of disk for downloads.

    Of one test: a machine starts processes while it runs, which measure it.
    """
    shutil.copytree(tiny("llama"), tmp_path / "cache" / FORBIDDEN)
    limits = ["--pool-models", "org/*", "--pool-disk-gib", "0.0001"]
    limits += ["--cache-dir", str(tmp_path / "machine")]
    with open_pool(tmp_path, [limits]) as pool:
        yield pool


def refusal(pool: Pool, *arguments: str) -> str:
    refused = pool.swarm("create", *arguments)
    assert refused.returncode != 0
    [line] = [line for line in refused.stderr.splitlines() if not line.startswith("[waiting")]
    assert line.startswith(f"error: {arguments[0]} is not built: ")
    return line


def test_a_model_that_no_operator_allows(pool: Pool) -> None:
    assert f"none of 1 machines on offer may hold {FORBIDDEN}" in refusal(pool, FORBIDDEN)


def test_a_model_that_does_not_exist(pool: Pool) -> None:
    line = refusal(pool, ABSENT)
    assert ABSENT in line.removeprefix(f"error: {ABSENT}")
    assert "not" in line


def test_a_full_disk(pool: Pool) -> None:
    assert "disk limit" in refusal(pool, LARGE)
    assert not list((pool.folder / "machine").rglob("*.safetensors"))


def test_an_orchestrator_that_no_machine_obeys(
    tmp_path: Path, hub: FakeHub, tiny: Callable[[str], Path]
) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "cache" / FORBIDDEN)
    (tmp_path / "other").mkdir()
    other = Identity.ephemeral(tmp_path / "other").peer_id
    with open_pool(tmp_path, [["--allow-orchestrators", other]]) as pool:
        assert "none of 1 machines on offer obeys this orchestrator" in refusal(pool, FORBIDDEN)
        assert pool.held(FORBIDDEN, "loading") == pool.held(FORBIDDEN, "serving") == []
