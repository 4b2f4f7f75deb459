"""Audits of sessions with an adapter, which is fetched by its digest and used to compute again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nesa_node import publish_adapter
from nesa_node.client.verification import adapter_fetch, auditor
from nesa_node.core.errors import RefusedError
from nesa_node.core.settings.choices import RouteName
from nesa_node.engine.weights.adapter_files import ADAPTER_WEIGHTS_FILE
from nesa_node.swarm.adapter_transfer import AdapterPeer
from tests.audit_outcomes import audit_outcomes
from tests.client.local_models import random_ids
from tests.e2e.joining import ROUTES, joined
from tests.e2e.liars import calibrate_tiny_models, lie, peer_of, scale
from tests.e2e.test_adapters import make_adapter
from tests.engine.tiny_models import BLOCKS
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS
from tests.swarms import in_process_swarm, thirds

pytestmark = [*PEFT_WARNINGS, pytest.mark.timeout(180)]
Publish = Callable[[tuple[str, ...]], None]
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(autouse=True)
def _small_models_are_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other test's liars are known."""
    calibrate_tiny_models(monkeypatch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture
def publish(llama: Path, tmp_path: Path) -> Publish:
    """Publishes an adapter of the name "one" in a swarm."""

    def publish(addresses: tuple[str, ...]) -> None:
        folder = make_adapter(llama, tmp_path / "one", 1)
        author = tmp_path / "author"
        publish_adapter(
            str(llama), folder, name="one", initial_peers=addresses, identity_path=author
        )

    return publish


@pytest.mark.parametrize("route", ROUTES)
def test_honest_nodes_pass(llama: Path, tmp_path: Path, publish: Publish, route: RouteName) -> None:
    """With a reused prefix, too."""
    prompt = random_ids(1, 80)
    with in_process_swarm(
        llama, thirds(BLOCKS), tmp_path, cache_dir=tmp_path / "cache"
    ) as addresses:
        publish(addresses)
        with joined(llama, addresses, route, audit=1.0, adapter="one") as model:
            for _ in range(2):
                model.generate(prompt, **OPTIONS)
            model.close()
            assert audit_outcomes(model) == {"passed": 6}


@pytest.mark.parametrize("by_nodes", [False, True])
def test_a_node_that_lies_is_named(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    publish: Publish,
    by_nodes: bool,
) -> None:
    spans = thirds(BLOCKS)
    lie(monkeypatch, spans[1], scale, in_parts=True)
    swarm = [*spans, *spans] if by_nodes else spans
    if by_nodes:
        monkeypatch.setattr(auditor, "missing_bytes", lambda *_: 10**6)
    with in_process_swarm(llama, swarm, tmp_path, cache_dir=tmp_path / "cache") as addresses:
        publish(addresses)
        with joined(llama, addresses, "chain", audit=1.0, adapter="one") as model:
            connection: Any = model._ensure_connection()
            liar = peer_of(tmp_path / "node-1.key")
            if by_nodes:
                # The first session is over the liar; its auditor may be any node.
                connection._planner.barred = {peer_of(tmp_path / "node-4.key")}
                finish = connection._auditor._compute_again

                async def compute_again(*args: Any) -> Any:
                    connection._planner.barred = connection._auditor.history.barred
                    return await finish(*args)

                monkeypatch.setattr(connection._auditor, "_compute_again", compute_again)
                model.generate(random_ids(1, 8), **OPTIONS)
            else:
                with pytest.raises(RefusedError, match="wrong activations"):
                    model.generate(random_ids(1, 8), **OPTIONS)
            model.close()
            assert connection._auditor.history.barred.keys() == {liar}


async def _find_nobody(*_: object) -> dict[str, object]:
    return {}


@pytest.mark.parametrize("trick", ["none has it", "another one is sent"])
def test_without_the_adapter_nothing_is_audited(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: Publish, trick: str
) -> None:
    """A node that sends another adapter could have honest ones blamed."""
    other = make_adapter(llama, tmp_path / "other", 2)
    get = AdapterPeer.get

    async def get_other(*args: Any, config: Path, weights: Path) -> None:
        await get(*args, config=config, weights=weights)
        await asyncio.to_thread(shutil.copy, other / ADAPTER_WEIGHTS_FILE, weights)

    with in_process_swarm(
        llama, thirds(BLOCKS), tmp_path, cache_dir=tmp_path / "cache"
    ) as addresses:
        publish(addresses)
        with joined(llama, addresses, "chain", audit=1.0, adapter="one") as model:
            model.generate(random_ids(1, 8), max_new_tokens=1)  # nodes have fetched it
            if trick == "none has it":
                monkeypatch.setattr(adapter_fetch, "find_holders", _find_nobody)
            else:
                monkeypatch.setattr(AdapterPeer, "get", get_other)
            model.generate(random_ids(1, 8), **OPTIONS)
            model.close()
            assert audit_outcomes(model) == {"passed": 3, "not audited": 3}
