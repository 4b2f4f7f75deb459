"""What an orchestrator, or a stranger, can ask of a machine: notices and the operator's limits."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from pydantic import ValidationError

from nesa_node.core.errors import ConfigError, ModelNotFoundError, SwarmError
from nesa_node.core.ids import PeerId
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.model.gpu_use import (
    UtilizationSample,
    read_share_of_others,
    watch_other_programs,
)
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.server.pool import member as pool_member
from nesa_node.server.pool import models as pool_models
from nesa_node.server.pool.figures import DeviceFigures
from nesa_node.server.pool.member import PoolMember
from nesa_node.server.pool.models import locate_model
from nesa_node.server.pool.terms import OperatorTerms
from nesa_node.swarm.dht.pool_notices import (
    POOL,
    AssignedSpan,
    HeldModel,
    MachineAssignment,
    Offer,
    WantedSwarm,
)
from nesa_node.swarm.dht.sealing import Lease
from nesa_node.swarm.p2p.identity import Identity
from tests.engine.fake_hub import fake_hub
from tests.swarm.notice_fields import make_notice

PATHS = ("/etc/passwd", "../up", "a/../b", "~root", "a/b/c", "C:\\x", ".hidden", "a\0b", "", "a//b")


def span(model: str = "org/one", **fields: Any) -> AssignedSpan:
    return AssignedSpan(model=model, span=(0, 2), cache_tokens=64, **fields)


class ScriptedNotices:
    """Notices that a DHT would return; everything else of the member is real."""

    def __init__(self) -> None:
        self.found: dict[tuple[type, str], list[Any]] = {}
        self.error: Exception | None = None

    async def fetch(self, kind: type, topic: str) -> list[Any]:
        if self.error is not None:
            raise self.error
        return self.found.get((kind, topic), [])

    def pin_signers(self, signers: Sequence[PeerId]) -> None:
        pass


@pytest.fixture
def own(tmp_path: Path) -> Identity:
    return Identity.ephemeral(tmp_path)


def make_member(
    own: Identity,
    notices: ScriptedNotices,
    folder: Path,
    *,
    read_gpu_share: Callable[[], float] | None = None,
    hour: Callable[[], int] = lambda: 12,
    clock: Callable[[], float] = time.monotonic,
    **given: object,
) -> PoolMember:
    config = NodeConfig.model_validate({"cache_dir": folder, **given})
    swarm: Any = SimpleNamespace(
        identity=own, notices=notices, transport=SimpleNamespace(addresses=())
    )
    terms = OperatorTerms(
        config,
        read_gpu_share,
        clock=clock,
        local_time=lambda: datetime(2026, 11, 26, hour(), 59),
    )
    cpu = torch.device("cpu")
    return PoolMember(config, swarm, cpu, DeviceFigures(cpu, 1, folder), terms)


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
    own: Identity, tmp_path: Path, given: dict[str, Any], assigned: AssignedSpan, words: str
) -> None:
    member = make_member(own, ScriptedNotices(), tmp_path, **given)
    await member._apply((assigned,))
    assert member._children == {}
    [refusal] = member._refusals.values()
    assert refusal.state == "refused"
    assert words in refusal.reason
    await member._apply(())
    assert member._refusals == {}


async def test_a_node_that_is_being_stopped_is_waited_for_at_the_end(
    own: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []

    class Child:
        def __init__(self, assigned: AssignedSpan, *_: object) -> None:
            self.assigned = assigned

        async def run(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                stopped.append(self.assigned.model)

    monkeypatch.setattr(pool_member, "ChildNode", Child)
    monkeypatch.setattr(PoolMember, "_offer_fields", lambda _: {})
    notices: Any = ScriptedNotices()
    monkeypatch.setattr(notices, "publish", AsyncMock(), raising=False)
    member = make_member(own, notices, tmp_path)
    await member._apply((span("org/one"), span("org/two")))
    await asyncio.sleep(0.01)
    await member._apply((span("org/one"),))  # releases the second
    await asyncio.sleep(0.01)
    await member.close()
    assert sorted(stopped) == ["org/one", "org/two"]


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


class Child:
    """A node that serves until it is stopped."""

    def __init__(self, assigned: AssignedSpan, *_: object) -> None:
        self.assigned = assigned

    async def run(self) -> None:
        await asyncio.Event().wait()

    def held(self) -> HeldModel:
        return HeldModel(model=self.assigned.model, state="serving", span=self.assigned.span)


async def follow(member: PoolMember) -> tuple[list[str], tuple[str, ...], str]:
    """One look at the assignments: models that are held then, allowed, and why none is."""
    with suppress(SwarmError):
        await member._follow_once()
    await asyncio.sleep(0.01)
    fields = member._offer_fields()
    return list(member._children), fields["models"], fields["away_reason"]


def assign(notices: ScriptedNotices, own: Identity, *spans: AssignedSpan) -> None:
    """Have the machine's own orchestrator lead the pool, and assign."""
    now = time.time()
    notices.found[Lease, POOL] = [make_notice(Lease, own, now, model_id=POOL, epoch=1)]
    notices.found[MachineAssignment, own.peer_id] = [
        make_notice(MachineAssignment, own, now, model_id=own.peer_id, spans=spans)
    ]


async def test_what_is_held_is_given_back_when_the_hours_end(
    own: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_member, "ChildNode", Child)
    hour, notices = 21, ScriptedNotices()
    member = make_member(own, notices, tmp_path, pool_hours=(20, 8), hour=lambda: hour)
    assign(notices, own, span())
    serving = (["org/one"], ("*",), "")
    away: tuple[list[str], tuple[str, ...], str] = ([], (), "--pool-hours 20-8")
    assert await follow(member) == serving
    hour = 7
    assert await follow(member) == serving
    hour = 8
    assert await follow(member) == away
    hour = 19
    assert await follow(member) == away
    hour = 20
    assert await follow(member) == serving
    hour, notices.error = 9, SwarmError("no member of the DHT answers")
    assert await follow(member) == away, "needs no answer"
    await member._running.close()


async def test_what_is_held_is_given_back_while_other_programs_use_the_gpu(
    own: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_member, "ChildNode", Child)
    notices, now, share = ScriptedNotices(), 1000.0, 0.1
    member = make_member(
        own,
        notices,
        tmp_path,
        pool_gpu_share=0.25,
        read_gpu_share=lambda: share,
        clock=lambda: now,
    )
    assign(notices, own, span())
    serving = (["org/one"], ("*",), "")
    for _ in range(4):
        now += 10
        assert await follow(member) == serving
    now, share = now + 10, 0.8
    assert await follow(member) == serving, "a mean of (5 * 0.1 + 0.8) / 6 = 0.22"
    now += 10  # (4 * 0.1 + 2 * 0.8) / 6
    words = "--pool-gpu-share 0.25: other programs use 0.33 of the GPU"
    assert await follow(member) == ([], (), words)
    now, share = now + 61, 0.0
    assert await follow(member) == serving
    await member._running.close()


async def test_a_gpu_whose_use_is_not_known_is_not_lent_by_its_use(
    own: Identity, tmp_path: Path
) -> None:
    def read() -> float:
        raise OSError("the NVIDIA driver does not tell what other programs use: nvmlInit 9")

    member = make_member(own, ScriptedNotices(), tmp_path, pool_gpu_share=0.5, read_gpu_share=read)
    _, models, reason = await follow(member)
    assert models == ()
    assert reason == (
        "--pool-gpu-share: the NVIDIA driver does not tell what other programs use: nvmlInit 9"
    )


def test_the_gpus_use_is_read_of_nvidia_gpus_only() -> None:
    with pytest.raises(ConfigError, match="--pool-gpu-share is for an NVIDIA GPU"):
        watch_other_programs(torch.device("cpu"))


class ScriptedNvml:
    """NVML as far as `read_share_of_others` calls it; `samples` are process ids and percents."""

    def __init__(self, samples: dict[int, int], code: int = 0) -> None:
        self._samples, self._code = samples, code

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetProcessUtilization(
        self, handle: Any, samples: Any, count: Any, since_us: Any
    ) -> int:
        assert abs(since_us.value / 1e6 - time.time()) < 60
        assert count._obj.value >= len(self._samples)
        for index, (pid, percent) in enumerate(self._samples.items()):
            samples[index].pid, samples[index].compute_percent = pid, percent
        count._obj.value = len(self._samples)
        return self._code


def test_own_processes_are_no_other_programs() -> None:
    nvml = ScriptedNvml({7: 50, 8: 20, 9: 11})
    assert read_share_of_others(nvml, "GPU-1", {7, 70}) == pytest.approx(0.31)
    assert read_share_of_others(ScriptedNvml({7: 90, 8: 90}), "GPU-1", set()) == 1.0
    assert read_share_of_others(ScriptedNvml({}, code=6), "GPU-1", set()) == 0.0
    for uuid, broken in (("GPU-2", nvml), ("GPU-1", ScriptedNvml({}, code=3))):
        with pytest.raises(OSError, match="does not tell what other programs use"):
            read_share_of_others(broken, uuid, set())
    assert ctypes.sizeof(UtilizationSample) == 32, "as in nvml.h"


async def test_a_family_that_no_node_serves_is_told(own: Identity, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--pool-families lama: no such family; there are llama"):
        make_member(own, ScriptedNotices(), tmp_path, pool_families=("llama", "lama"))


async def test_other_families_are_refused(
    own: Identity, tmp_path: Path, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_member, "ChildNode", Child)
    for family in ("qwen2", "llama"):
        (tmp_path / family).symlink_to(tiny(family))
    member = make_member(own, ScriptedNotices(), tmp_path, pool_families=("llama",))
    await member._apply((span("qwen2"), span("llama")))
    assert list(member._children) == ["llama"]
    [refusal] = member._refusals.values()
    assert refusal.reason == "--pool-families does not allow qwen2, the family of qwen2"
    assert len(member._terms._loads) == 1, "what is refused is not counted"
    await member._running.close()


async def test_a_large_download_is_refused_before_it_begins(
    own: Identity, tmp_path: Path, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(pool_member, "ChildNode", Child)
    with fake_hub(tiny("llama")) as hub:
        opened = partial(open_checkpoint, endpoint=hub.url)
        monkeypatch.setattr(pool_models, "open_checkpoint", opened)
        size = (tiny("llama") / "model.safetensors").stat().st_size
        for allowed, held in ((size - 1, []), (size + 20_000, ["org/tiny"])):
            member = make_member(
                own, ScriptedNotices(), tmp_path / "cache", pool_max_download_gib=allowed / 2**30
            )
            await member._apply((span("org/tiny"),))
            assert list(member._children) == held
            if not held:
                [refusal] = member._refusals.values()
                assert refusal.reason.startswith("--pool-max-download-gib: files of org/tiny")
            await member._running.close()
        assert hub.downloads["model.safetensors"] < 2 * 100_001, "only headers"


@pytest.mark.parametrize(
    ("fields", "asked", "allowed"),
    [
        ({}, ("org/one", "llama", 2**50), True),
        ({"models": ()}, ("org/one", "llama", 0), False),
        ({"models": ("org/*",)}, ("other/one", "llama", 0), False),
        ({"families": ("llama", "qwen2")}, ("org/one", "qwen2", 0), True),
        ({"families": ("llama",)}, ("org/one", "qwen2", 0), False),
        ({"families": ("llama",)}, ("org/one", "", 0), True),
        ({"max_download_bytes": 10}, ("org/one", "llama", 10), True),
        ({"max_download_bytes": 10}, ("org/one", "llama", 11), False),
    ],
)
def test_an_offer_tells_what_its_operator_allows(
    own: Identity, fields: dict[str, Any], asked: tuple[str, str, int], allowed: bool
) -> None:
    offer = make_notice(Offer, own, 1e9, **({"models": ("*",)} | fields))
    assert isinstance(offer, Offer)
    assert offer.allows(*asked) == allowed


@pytest.mark.parametrize(
    "fields",
    [
        {"families": ("llama",) * 17},
        {"families": ("x" * 33,)},
        {"max_download_bytes": -1},
        {"away_reason": "x" * 121},
    ],
)
def test_terms_of_an_offer_are_bounded(own: Identity, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make_notice(Offer, own, 1e9, **fields)


def test_an_offer_does_not_have_more_free_than_there_is(own: Identity) -> None:
    with pytest.raises(ValidationError, match="more memory is free"):
        make_notice(Offer, own, 1e9, memory_free_bytes=2**40, memory_total_bytes=2**30)
