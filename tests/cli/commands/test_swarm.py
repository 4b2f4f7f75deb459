"""`nesa-node swarm create --dry-run` and `show`, over a scripted pool."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.cli import swarm_reader
from nesa_node.cli.app import run_command
from nesa_node.core.ids import PeerId
from nesa_node.server.pool.speeds import CLIENT_S
from nesa_node.swarm.dht.pool_notices import (
    POOL,
    HeldModel,
    MeasuredFigures,
    Offer,
    PoolStatus,
    SwarmStatus,
)
from nesa_node.swarm.p2p.identity import Identity
from tests.cli.test_views import record
from tests.swarm.notice_fields import make_notice

PEER = "/ip4/192.0.2.7/tcp/31330/p2p/12D3KooWQYzU3DgfLcZ5mLQ2nRYeR6zWKJ2qWVhT4i3Ne4rkEcKA"
MIB = 2**20


class ScriptedPool:
    """A swarm of which offers, statuses, records and round trips are scripted; nothing is sent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.found: dict[tuple[type, str], list[Any]] = {(Offer, POOL): [], (PoolStatus, POOL): []}
        self.records: list[Any] = []
        self.rtt_ms = math.nan
        self.published: list[object] = []
        self.notices = SimpleNamespace(
            fetch=self._fetch, signed_by=lambda _: SimpleNamespace(publish=self._publish)
        )
        self.directory = SimpleNamespace(fetch_all=self._fetch_all)
        self.rtts = SimpleNamespace(ping_all=self._ping_all, rtt_ms=lambda _: self.rtt_ms)
        self.transport = None

    async def _fetch(self, kind: type, topic: str) -> list[Any]:
        return self.found[kind, topic]

    async def _fetch_all(self) -> list[Any]:
        return self.records

    async def _ping_all(self, *_: object, **__: object) -> None:
        pass

    async def _publish(self, *fields: object, **_: object) -> None:
        self.published.append(fields)

    def offer(self, name: str, mib: float, *held: HeldModel, **fields: Any) -> PeerId:
        folder = self._folder / name
        folder.mkdir()
        identity = Identity.ephemeral(folder)
        figures = MeasuredFigures(block_overhead_s=0.0, read_bytes_per_s=1e9, flop_per_s=1e15)
        given = {
            "device": "CPU of one",
            "device_type": "cpu",
            "public_name": name,
            "memory_total_bytes": int(mib * MIB),
            "memory_free_bytes": int(mib * MIB),
            "figures": dict.fromkeys(("float32", "int8"), figures),
            "models": ("*",),
            "obeys": (),
            "addresses": (),
            "held": held,
        }
        notice = make_notice(Offer, identity, time.time(), model_id=POOL, **(given | fields))
        self.found[Offer, POOL].append(notice)
        return PeerId(identity.peer_id)

    def status(self, **fields: Any) -> PeerId:
        identity = Identity.ephemeral(self._folder)
        swarms = (SwarmStatus(**fields),) if fields else ()
        notice = make_notice(PoolStatus, identity, time.time(), model_id=POOL, swarms=swarms)
        self.found[PoolStatus, POOL].append(notice)
        return PeerId(identity.peer_id)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedPool:
    scripted = ScriptedPool(tmp_path)

    @asynccontextmanager
    async def open_reader(_: object) -> AsyncIterator[ScriptedPool]:
        yield scripted

    monkeypatch.setattr(swarm_reader, "open_reader", open_reader)
    return scripted


@pytest.fixture
def flags(tmp_path: Path, tiny: Callable[[str], Path]) -> list[str]:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "small").symlink_to(tiny("llama"))
    identity = tmp_path / "identity.key"
    return ["--cache-dir", str(cache), "--initial-peers", PEER, "--identity-path", str(identity)]


def told(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert run_command(["swarm", *argv]) == code
    output = capsys.readouterr()
    return output.err if code else output.out


def test_a_dry_run_shows_the_plan_and_publishes_nothing(
    pool: ScriptedPool, flags: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    peer = pool.offer("attic", 1000)
    pool.offer("away", 1000, models=(), away_reason="--pool-hours 20-8")
    pool.rtt_ms = 4.0
    shown = json.loads(told(capsys, "create", "small", "--dry-run", "--json", *flags))
    [span] = shown["spans"]
    assert (shown["model"], shown["replicas"], shown["wanted"]) == ("small", 1, 1)
    assert (shown["names"][span["machine"]], span["machine"]) == ("attic", peer)
    assert span["hop_s"] == pytest.approx(0.005)
    assert span["size_bytes"] + span["left_bytes"] == 1000 * MIB
    assert shown["tokens_per_s"] == pytest.approx(
        1 / (span["step_s"] + 0.005 + span["head_s"] + CLIENT_S)
    )
    assert span["head_s"] > 0
    text = told(capsys, "create", "small", "--dry-run", "--replicas", "2", *flags)
    first, heading, row = text.splitlines()
    assert first.startswith(f"small: 1 of 2 replicas on 1 machine, {shown['tokens_per_s']:.1f} ")
    assert "replica 2: it does not fit: one more machine with " in first
    assert first.endswith("; nothing was asked for")
    assert heading.split() == [
        "MACHINE", "DEVICE", "STATE", "BLOCKS", "WEIGHTS", "TAKES", "LEFT", "STEP",
    ]  # fmt: skip
    end = span["span"][1]
    assert row.split()[:8] == ["attic", "CPU", "of", "one", "would", "load", f"0:{end}", "none"]
    assert not pool.published
    assert not (tmp_path / "identity.key").exists()


def test_a_dry_run_asks_no_machine_that_obeys_another_orchestrator(
    pool: ScriptedPool, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    peer = pool.offer("attic", 1000)
    [offer] = pool.found[Offer, POOL]
    pool.found[Offer, POOL] = [offer.model_copy(update={"obeys": (peer,)})]
    pool.status()
    words = "error: no machine is on offer"
    assert words in told(capsys, "create", "small", "--dry-run", *flags, code=5)


@pytest.mark.parametrize(
    ("argv", "mib", "code", "words"),
    [
        (["small"], 0.01, 5, "error: small would not be built: it does not fit: one more machine"),
        (["none"], 1000, 3, "error: "),
    ],
)
def test_a_dry_run_that_fails_says_why(
    pool: ScriptedPool,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    mib: float,
    code: int,
    words: str,
) -> None:
    pool.offer("attic", mib)
    error = told(capsys, "create", *argv, "--dry-run", *flags, code=code)
    assert error.startswith(words)
    assert error.count("\n") == 1


def test_a_dry_run_needs_no_live_pool(
    flags: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "pool.toml"
    file.write_text("[[machine]]\nname = 'attic'\ndevice = 'a10'\ncopies = 2\n")
    argv = ["create", "small", "--dry-run", "--pool", str(file), *flags[:2]]
    first, _, one, other = told(capsys, *argv, "--replicas", "2").splitlines()
    assert first.startswith("small: 2 of 2 replicas on 2 machines, ")
    assert [one.split()[:2], other.split()[:2]] == [["attic-1", "a10"], ["attic-2", "a10"]]
    file.write_text("[[machine]]\nname = 'attic'\n")
    error = told(capsys, *argv, code=2)
    assert error.startswith(f"error: {file}: machine 1 ('attic'): give device, or memory_gib,")


@pytest.mark.parametrize("flag", [["--pool", "x.toml"], ["--json"]])
def test_flags_of_a_dry_run_are_refused_without_it(
    flags: list[str], capsys: pytest.CaptureFixture[str], flag: list[str]
) -> None:
    error = told(capsys, "create", "small", *flag, *flags, code=2)
    assert error == f"error: {flag[0]} is for a dry run: give --dry-run, too\n"


def test_show_compares_a_prediction_with_what_nodes_measured(
    pool: ScriptedPool, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        record("one", (0, 5), peer_id="12D3KooWone", decode_tokens_per_s=50.0),
        record("two", (5, 8), peer_id="12D3KooWtwo", decode_tokens_per_s=100.0),
    ]
    nodes = [each.peer_id for each in records]
    held = [
        HeldModel(model="small", state="serving", span=(0, 5), node=nodes[0]),
        HeldModel(model="small", state="serving", span=(5, 8), node=nodes[1]),
        HeldModel(model="small", state="refused", span=(0, 8), reason="--pool-families does not"),
    ]
    for name, each in zip(("a", "b", "c"), held, strict=True):
        pool.offer(name, 1000, each)
    pool.offer("d", 1000)
    pool.offer("e", 1000, models=(), away_reason="--pool-hours 20-8")
    pool.offer("f", 1000, models=("org/*",))
    pool.status(
        model="small", state="serving", replicas=1, wanted=1, machines=2, predicted_tokens_per_s=30
    )
    pool.records = [*records, record("stranger", (0, 8), decode_tokens_per_s=900.0)]
    pool.rtt_ms = 9.0  # a hop of 10 ms
    text = told(capsys, "show", "small", *flags)
    assert "30.0 tokens/s" in text
    assert "measured: 19.0 tokens/s" in text, "1 / (1/50 + 1/100 + 2 * 0.01 + CLIENT_S)"
    assert "50.0 tokens/s" in text
    assert "--pool-families does not" in text
    assert text.splitlines()[-1] == (
        "without it: 1 machine: --pool-hours 20-8; 1 machine: its operator does not allow it; "
        "1 machine: may hold it"
    )
    shown = json.loads(told(capsys, "show", "small", "--json", *flags))
    assert shown["measured_tokens_per_s"] == pytest.approx(1 / (0.05 + CLIENT_S))
    assert shown["decode_tokens_per_s"] == {nodes[0]: 50.0, nodes[1]: 100.0}
    pool.records = records[:1]
    assert "measured: nothing yet" in told(capsys, "show", "small", *flags)


def test_machines_that_are_away_say_why(
    pool: ScriptedPool, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pool.offer("e", 1000, models=(), away_reason="--pool-gpu-share 0.2: other programs use 0.90")
    text = told(capsys, "pool", *flags)
    assert "away" in text
    assert "--pool-gpu-share 0.2: other programs use 0.90" in text
    assert "MEASURED" not in text
