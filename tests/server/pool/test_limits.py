"""What an orchestrator, or a stranger, can ask of a machine: notices and the operator's limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from nesa_node.core.errors import ModelNotFoundError
from nesa_node.core.ids import PeerId
from nesa_node.core.settings.models import NodeConfig
from nesa_node.server.pool import member as pool_member
from nesa_node.server.pool.figures import DeviceFigures
from nesa_node.server.pool.member import PoolMember
from nesa_node.server.pool.models import locate_model
from nesa_node.swarm.dht.pool_notices import (
    POOL,
    AssignedSpan,
    MachineAssignment,
    Offer,
    WantedSwarm,
)
from nesa_node.swarm.dht.sealing import Lease
from nesa_node.swarm.p2p.identity import Identity
from tests.swarm.notice_fields import make_notice

PATHS = ("/etc/passwd", "../up", "a/../b", "~root", "a/b/c", "C:\\x", ".hidden", "a\0b", "", "a//b")


def span(model: str = "org/one", **fields: Any) -> AssignedSpan:
    return AssignedSpan(model=model, span=(0, 2), cache_tokens=64, **fields)


class ScriptedNotices:
    """Notices that a DHT would return; everything else of the member is real."""

    def __init__(self) -> None:
        self.found: dict[tuple[type, str], list[Any]] = {}

    async def fetch(self, kind: type, topic: str) -> list[Any]:
        return self.found.get((kind, topic), [])

    def pin_signers(self, signers: Sequence[PeerId]) -> None:
        pass


@pytest.fixture
def own(tmp_path: Path) -> Identity:
    return Identity.ephemeral(tmp_path)


def make_member(
    own: Identity, notices: ScriptedNotices, folder: Path, **given: object
) -> PoolMember:
    config = NodeConfig.model_validate({"cache_dir": folder, **given})
    swarm: Any = SimpleNamespace(
        identity=own, notices=notices, transport=SimpleNamespace(addresses=())
    )
    return PoolMember(config, swarm, torch.device("cpu"), DeviceFigures("cpu", 1, folder))


@pytest.mark.parametrize("name", PATHS)
def test_no_notice_names_a_path(name: str) -> None:
    for make in (
        lambda: span(name),
        lambda: WantedSwarm(model=name, until=2e9),
    ):
        with pytest.raises(ValidationError):
            make()


@pytest.mark.parametrize("name", PATHS)
def test_no_path_is_located(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is no name of a model"):
        locate_model(name, tmp_path)


@pytest.mark.parametrize(
    ("given", "assigned", "words"),
    [
        ({"pool_models": ("org/*",)}, span("other/one"), "--pool-models does not allow other/one"),
        ({"pool_models": ("one",)}, span("org/one"), "--pool-models does not allow"),
        ({"pool_quant_types": ("none",)}, span(quant_type="nf4"), "does not allow nf4"),
    ],
)
async def test_what_the_operator_forbids_is_refused(
    own: Identity, tmp_path: Path, given: dict[str, object], assigned: AssignedSpan, words: str
) -> None:
    member = make_member(own, ScriptedNotices(), tmp_path, **given)
    await member._apply((assigned,))
    assert member._children == {}
    [refusal] = member._refusals.values()
    assert refusal.state == "refused"
    assert words in refusal.reason
    await member._apply(())
    assert member._refusals == {}


async def test_loads_in_an_hour_are_limited(
    own: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class Child:
        def __init__(self, assigned: AssignedSpan, *_: object) -> None:
            self.assigned = assigned
            started.append(assigned.model)

        async def run(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(pool_member, "ChildNode", Child)
    member = make_member(own, ScriptedNotices(), tmp_path, pool_loads_per_hour=3)
    for number in range(8):
        await member._apply((span(f"org/model-{number}"),))
        await asyncio.sleep(0.01)
    assert started == [f"org/model-{number}" for number in range(3)]
    assert "--pool-loads-per-hour: 3" in member._refusals["org/model-7"].reason
    await member._running.close()


async def test_only_listed_orchestrators_assign(own: Identity, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    listed, stranger = Identity.ephemeral(tmp_path / "a"), Identity.ephemeral(tmp_path / "b")
    now, notices = time.time(), ScriptedNotices()
    member = make_member(own, notices, tmp_path, allow_orchestrators=(listed.peer_id,))
    notices.found[MachineAssignment, own.peer_id] = [
        make_notice(MachineAssignment, stranger, now, model_id=own.peer_id, epoch=9),
        make_notice(MachineAssignment, listed, now, model_id=own.peer_id),
    ]
    notices.found[Lease, POOL] = [make_notice(Lease, stranger, now, model_id=POOL, epoch=9)]
    found = await member._find_assignment()
    assert found is not None
    assert found.signer == listed.peer_id
    assert await member._find_assignment() is None, "followed once"


async def test_without_a_list_the_leader_of_the_pool_assigns(own: Identity, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    leader, other = Identity.ephemeral(tmp_path / "a"), Identity.ephemeral(tmp_path / "b")
    now, notices = time.time(), ScriptedNotices()
    member = make_member(own, notices, tmp_path)
    notices.found[MachineAssignment, own.peer_id] = [
        make_notice(MachineAssignment, other, now, model_id=own.peer_id, epoch=99),
        make_notice(MachineAssignment, leader, now, model_id=own.peer_id),
    ]
    assert await member._find_assignment() is None, "no orchestrator leads"
    notices.found[Lease, POOL] = [
        make_notice(Lease, other, now, model_id=POOL, epoch=1),
        make_notice(Lease, leader, now, model_id=POOL, epoch=2),
    ]
    found = await member._find_assignment()
    assert found is not None
    assert found.signer == leader.peer_id


def test_an_offer_does_not_have_more_free_than_there_is(own: Identity) -> None:
    with pytest.raises(ValidationError, match="more memory is free"):
        make_notice(Offer, own, 1e9, memory_free_bytes=2**40, memory_total_bytes=2**30)
