"""Dry runs: what would be built, against the orchestrator, and against all chains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.placement.building import HOP_S, PoolMachine
from nesa_node.server.pool.dry_run import DryRun, Wanted, plan_offers, plan_swarm
from nesa_node.server.pool.machines import free_bytes, pool_machine, read_pool_file
from nesa_node.server.pool.speeds import CLIENT_S, TimedSpan, fastest_chain
from nesa_node.swarm.dht.pool_notices import POOL, Offer
from nesa_node.topology.roofline import WeightFigures
from nesa_node.topology.shape.failure_domains import declared_domains
from tests.server.pool.test_builder import BLOCK_BYTES, BLOCKS, SHAPE, Bench, holding, wanted


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def dry_run(bench: Bench, replicas: int = 1) -> DryRun:
    offers = bench.notices[Offer, POOL]
    rtts_ms = {each.signer: math.nan for each in offers}
    return plan_offers(offers, Wanted("org/one", replicas), {"org/one": SHAPE}, rtts_ms)


async def test_what_a_dry_run_shows_is_what_is_assigned(bench: Bench) -> None:
    rng = np.random.default_rng(5)
    shortages = 0
    for _ in range(40):
        bench.builder._assignments.keep(())
        bench.published.clear()
        bench.notices.clear()
        names = [f"m{index}" for index in range(int(rng.integers(1, 6)))]
        for name in names:
            speed = float(rng.choice([20, 50, 400]))
            operator = str(rng.choice(["one", "two"]))
            bench.offer(name, int(rng.integers(1, 9)), gb_per_s=speed, operator=operator)
        replicas = int(rng.integers(1, 3))
        bench.want(wanted(replicas, replicas))
        bench.builder._demand.clear()
        planned = dry_run(bench, replicas)
        status = await bench.run_round()
        peers = {bench.identity(name).peer_id: name for name in names}
        shown = {peers[each.timed.peer]: each.timed.span for each in planned.spans}
        assert shown == {name: span for name in names for _, span in bench.assigned(name)}
        shortages += bool(planned.shortage)
        if planned.shortage:
            assert status.swarms[0].reason == planned.shortage
        if planned.replicas:
            predicted = status.swarms[0].predicted_tokens_per_s
            # Of two replicas the faster counts, of each span the faster holder.
            assert 1 / planned.step_s >= predicted * (1 - 1e-9)
            if replicas == 1:
                assert 1 / planned.step_s == pytest.approx(predicted)
    assert 5 < shortages < 35


async def test_machines_that_hold_it_already_count(bench: Bench) -> None:
    bench.offer("a", 5, holding(0, 5))
    bench.offer("b", 9)
    planned = dry_run(bench)
    [each] = planned.spans
    assert (each.timed.span, each.size_bytes, each.left_bytes) == (
        Span(5, 8),
        3 * BLOCK_BYTES,
        6 * BLOCK_BYTES,
    )
    assert [held.span for held in planned.held] == [Span(0, 5)]
    assert planned.step_s == pytest.approx(BLOCKS * BLOCK_BYTES / 1e11 + 2 * HOP_S + CLIENT_S)


async def test_a_first_token_takes_the_arithmetic_of_the_prompt(bench: Bench) -> None:
    bench.offer("a", 9)
    planned = dry_run(bench)
    # 1e9 operations for a token of a block at 1e15 a second are less than 1 GB read at 100 GB/s.
    assert planned.first_token_s == pytest.approx(8 * 0.01 + HOP_S + CLIENT_S)
    figures = WeightFigures(0.0, 1e11, 1e12)  # 128 tokens: 0.128 s a block
    slow = PoolMachine(PeerId("slow"), 8 * BLOCK_BYTES, {"bfloat16": figures})
    planned = plan_swarm(SHAPE, [slow], Wanted("org/one"))
    assert planned.first_token_s == pytest.approx(8 * 0.128 + HOP_S + CLIENT_S)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"models": ("other/*",)}, "none of 1 machines on offer may hold org/one"),
        ({"held": (holding(0, 8, "refused", "no"),)}, "all machines refuse: no"),
        ({"memory_total_bytes": 6 * BLOCK_BYTES}, "one more machine with 2.0 GB free for models"),
    ],
)
def test_a_dry_run_says_why_nothing_would_be_built(
    bench: Bench, fields: dict[str, Any], words: str
) -> None:
    bench.offer("a", 9)
    [offer] = bench.notices[Offer, POOL]
    bench.notices[Offer, POOL] = [offer.model_copy(update=fields)]
    planned = dry_run(bench)
    assert planned.replicas == 0
    assert math.isnan(planned.step_s)
    assert planned.as_json()["tokens_per_s"] is None
    assert words in planned.shortage


def test_free_memory_is_what_is_allowed_less_what_is_held(bench: Bench) -> None:
    bench.offer("a", 9)
    [offer] = bench.notices[Offer, POOL]
    shapes = {"org/one": SHAPE}
    two = holding(0, 2)
    serving = offer.model_copy(update={"held": (two,), "memory_free_bytes": 7 * BLOCK_BYTES})
    assert free_bytes(serving, {"org/one": two}, shapes) == 7 * BLOCK_BYTES
    loading = serving.model_copy(update={"held": (holding(0, 2, "loading"),)})
    assert free_bytes(loading, {"org/one": two}, shapes) == 5 * BLOCK_BYTES
    assert free_bytes(offer, {"org/two": two}, shapes) == 0, "of a size that is not known"
    for untrue in (holding(0, 9), two.model_copy(update={"quant_type": "nf4"})):
        assert free_bytes(offer, {"org/one": untrue}, shapes) == 9 * BLOCK_BYTES
    assert pool_machine(serving, "org/one", SHAPE, {}, shapes) is None, "it is shown"
    many = {f"org/{index}": two for index in range(8)}
    assert pool_machine(offer, "org/one", SHAPE, many, shapes) is None
    machine = pool_machine(offer, "org/one", SHAPE, {}, shapes, slowdown=lambda kind: 2.0)
    assert machine is not None
    assert machine.figures["bfloat16"].read_bytes_per_s == 5e10


def all_chains(spans: list[TimedSpan], start: int, end: int) -> Iterator[float]:
    """Times of all ways through the blocks from `start` on."""
    if start == end:
        yield 0.0
    for each in spans:
        if each.span.start <= start < each.span.end:
            for stop in range(start + 1, each.span.end + 1):
                own = each.hop_s + (stop - start) / len(each.span) * each.step_s
                for rest in all_chains(spans, stop, end):
                    yield own + rest


def test_the_fastest_chain_is_that_of_all_chains() -> None:
    rng, holes = np.random.default_rng(8), 0
    for _, count in itertools.product(range(60), (1, 2, 3, 4)):
        spans = []
        for index in range(count):
            start = int(rng.integers(0, 5))
            span = Span(start, int(rng.integers(start + 1, 6)))
            times = [float(each) for each in rng.uniform(0, 1, 2)]
            spans.append(TimedSpan(PeerId(f"m{index}"), span, times[0], 0.0, times[1]))
        chain = fastest_chain(spans, 5)
        best = min(all_chains(spans, 0, 5), default=math.inf)
        holes += math.isinf(best)
        if math.isinf(best):
            assert chain == ()
            continue
        assert sum(each.step_s + each.hop_s for each in chain) == pytest.approx(best)
        ends = [0, *(each.span.end for each in chain)]
        assert [each.span.start for each in chain] == ends[:-1]
        assert ends[-1] == 5
    assert 20 < holes < 220


GOOD = """
[[machine]]
name = "attic"
device = "rtx3090"
round_trip_ms = 9

[[machine]]
name = "rack"
copies = 2
memory_gib = 2
read_gb_per_s = 100
tflop_per_s = 3
block_overhead_ms = 0
quant_types = ["none", "int8"]
operator = "one"
"""


def test_a_file_describes_machines(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(GOOD)
    machines, devices = read_pool_file(path)
    assert list(machines) == ["attic", "rack-1", "rack-2"]
    assert devices == {"attic": "rtx3090", "rack-1": "", "rack-2": ""}
    attic, rack = machines[PeerId("attic")], machines[PeerId("rack-2")]
    assert attic.hop_s == pytest.approx(0.01)
    assert attic.memory_bytes == 24 * 10**9
    assert attic.figures["nf4"].read_bytes_per_s == pytest.approx(0.6 * 936e9)
    assert (rack.memory_bytes, rack.quant_types, rack.hop_s) == (2**31, ("none", "int8"), HOP_S)
    assert rack.figures["bfloat16"] == WeightFigures(0.0, 1e11, 3e12)
    assert not attic.domains
    assert rack.domains == declared_domains((), "one")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[machine]\n", "is not TOML"),
        ("", r"it needs entries \[\[machine\]\]"),
        ("machine = 3", r"it needs entries \[\[machine\]\]"),
        ("pool = 1\n" + GOOD, r"it needs entries \[\[machine\]\]"),
        ("machine = [3]", "machine 1: "),
        ("[[machine]]\nmemory_gib = 3", "machine 1: name: Field required"),
        (GOOD.replace("memory_gib = 2", "memory_gib = -2"), r"machine 2 \('rack'\): memory_gib: "),
        (GOOD.replace("memory_gib = 2", "memory_gib = '2'"), r"machine 2 \('rack'\): memory_gib: "),
        (GOOD.replace("memory_gib = 2", ""), r"machine 2 \('rack'\): give device, or memory_gib, "),
        (GOOD.replace("int8", "int4"), r"machine 2 \('rack'\): quant_types.1: "),
        (GOOD.replace("copies = 2", "copy = 2"), r"machine 2 \('rack'\): copy: Extra inputs"),
        (GOOD.replace("copies = 2", "copies = 2000"), r"machine 2 \('rack'\): copies: "),
        (GOOD.replace("rtx3090", "abacus"), r"machine 1 \('attic'\): no device is called"),
        (
            GOOD.replace('"attic"', '"rack-2"'),
            r"machine 2 \('rack'\): another machine is called rack-2",
        ),
        (GOOD.replace('"rack"', r'"a\nb"'), r"machine 2 \('a\\nb'\): name: "),
        (
            GOOD + "[[machine]]\nname='x'\ndevice='a10'\ncopies=1022",
            r"machine 3 \('x'\): more than",
        ),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_pool_file(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_pool_file(tmp_path / "none.toml")
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_pool_file(path)
