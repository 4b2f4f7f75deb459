"""Plans for machines of a pool, against all subsets of machines."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.choices import PlacementGoal, PoolQuantType
from nesa_node.routing.placement.building import (
    HOP_S,
    BuildPlan,
    BuildShortage,
    ModelShape,
    PoolMachine,
    missing_spans,
    plan_build,
    plan_replica,
)
from nesa_node.topology.roofline import BlockWork, WeightFigures
from nesa_node.topology.shape.failure_domains import DeclaredDomain, declared_domains

GB = 10**9
BYTES: dict[PoolQuantType, int] = {"none": GB, "int8": GB // 2, "nf4": GB // 4}
CACHE_BYTES = GB // 10


def shape(blocks: int) -> ModelShape:
    return ModelShape(
        "org/model",
        {kind: (size,) * blocks for kind, size in BYTES.items()},
        {kind: (BlockWork(size, GB),) * blocks for kind, size in BYTES.items()},
        cache_tokens=8192,
        cache_bytes=CACHE_BYTES,
    )


def machine(name: str, gigabytes: float, gb_per_s: float, **options: object) -> PoolMachine:
    figures = WeightFigures(0.0, gb_per_s * GB, 1e15)
    kinds = dict.fromkeys(("bfloat16", "int8", "nf4"), figures)
    return PoolMachine(PeerId(name), int(gigabytes * GB), kinds, **options)  # type: ignore[arg-type]


def room(each: PoolMachine, kind: PoolQuantType = "none") -> int:
    return each.memory_bytes // (BYTES[kind] + CACHE_BYTES)


def block_s(each: PoolMachine) -> float:
    return GB / each.figures["bfloat16"].read_bytes_per_s


def best_latency_s(machines: list[PoolMachine], blocks: int) -> float:
    """Of all subsets, each filled from its fastest machine on."""
    best = math.inf
    for count in range(1, len(machines) + 1):
        for chosen in itertools.combinations(machines, count):
            left, seconds = blocks, 0.0
            for each in sorted(chosen, key=block_s):
                share = min(left, room(each))
                left -= share
                seconds += share * block_s(each) + (HOP_S if share else 0.0)
            best = min(best, seconds if not left else math.inf)
    return best


def best_slowest_s(machines: list[PoolMachine], blocks: int) -> float:
    """Of all machines: more of them are never slower."""
    times = sorted(share * block_s(each) for each in machines for share in range(1, room(each) + 1))
    for seconds in times:
        if sum(min(room(each), int(seconds / block_s(each) + 1e-9)) for each in machines) >= blocks:
            return seconds
    return math.inf


def random_machines(seed: int) -> list[PoolMachine]:
    rng = np.random.default_rng(seed)
    return [
        machine(f"m{index}", float(rng.uniform(1, 14)), float(rng.choice([20, 50, 400, 900])))
        for index in range(int(rng.integers(2, 8)))
    ]


def most_downloadable(files: list[dict[str, int]], span: Span, most_bytes: int) -> int:
    """By trying all numbers of blocks, and all places of each."""

    def takes(start: int, end: int) -> int:
        return sum(
            {name: size for each in files[start:end] for name, size in each.items()}.values()
        )

    fitting = [
        count
        for count in range(1, len(span) + 1)
        if all(
            takes(start, start + count) <= most_bytes
            for start in range(span.start, span.end - count + 1)
        )
    ]
    return max(fitting, default=0)


def test_blocks_to_download_fit_wherever_the_span_lies() -> None:
    rng = np.random.default_rng(3)
    found = set()
    for _ in range(300):
        blocks, most = int(rng.integers(1, 9)), int(rng.integers(1, 30))
        sizes = [int(size) for size in rng.integers(1, 12, 5)]
        firsts = np.sort(rng.integers(0, 4, blocks))
        files = [
            {f"{i}": sizes[i] for i in (first, first + int(rng.integers(2)))} for first in firsts
        ]
        start = int(rng.integers(blocks))
        span = Span(start, int(rng.integers(start + 1, blocks + 1)))
        model = replace(shape(blocks), block_files=tuple(files))
        expected = most_downloadable(files, span, most)
        assert model.downloadable_blocks(span, most) == expected
        assert model.downloadable_blocks(span, None) == len(span)
        found.add(expected < len(span))
    assert found == {True, False}


def test_a_plan_downloads_no_more_than_a_machine_allows() -> None:
    files = ({"a": 4 * GB},) * 4 + ({"b": 4 * GB},) * 4
    model = replace(shape(8), block_files=files)
    machines = [machine("a", 50, 100, max_download_bytes=5 * GB), machine("b", 5, 50)]
    plan = plan_build(model, Span(0, 8), machines)
    assert isinstance(plan, BuildShortage), "blocks 3:5 are in two files"
    plan = plan_build(model, Span(0, 4), machines)
    assert isinstance(plan, BuildPlan)
    assert [(each.peer, each.span) for each in plan.spans] == [("a", Span(0, 4))]
    plan = plan_build(model, Span(0, 8), [machine("a", 50, 100, max_download_bytes=8 * GB)])
    assert isinstance(plan, BuildPlan)
    assert (model.least_download_bytes, shape(8).least_download_bytes) == (4 * GB, 0)


def check(plan: BuildPlan, machines: list[PoolMachine], span: Span) -> None:
    ends = [span.start, *(each.span.end for each in plan.spans)]
    assert [each.span.start for each in plan.spans] == ends[:-1]
    assert ends[-1] == span.end
    of_peer = {each.peer: each for each in machines}
    assert len({each.peer for each in plan.spans}) == len(plan.spans)
    for each in plan.spans:
        assert 0 < len(each.span) <= room(of_peer[each.peer], each.quant_type)


@pytest.mark.parametrize("goal", ["latency", "throughput"])
def test_plans_are_near_the_best_of_all_subsets(goal: PlacementGoal) -> None:
    ratios = []
    for seed in range(120):
        machines, blocks = random_machines(seed), 12
        plan = plan_build(shape(blocks), Span(0, blocks), machines, goal=goal)
        if sum(map(room, machines)) < blocks:
            assert isinstance(plan, BuildShortage)
            continue
        assert isinstance(plan, BuildPlan)
        check(plan, machines, Span(0, blocks))
        if goal == "latency":
            ratios.append(plan.step_s / best_latency_s(machines, blocks))
        else:
            ratios.append(plan.slowest_s / best_slowest_s(machines, blocks))
    assert len(ratios) > 60
    assert min(ratios) > 0.999
    assert np.mean(ratios) < 1.02
    assert max(ratios) < 1.35


def test_part_of_a_model_is_planned_where_only_that_lacks_holders() -> None:
    assert list(missing_spans([1, 1, 0, 0, 1], 1)) == [Span(2, 4)]
    assert list(missing_spans([1, 0], 2)) == [Span(1, 2), Span(0, 2)]
    machines = [machine("a", 3, 50), machine("b", 3, 50)]
    plan = plan_build(shape(8), Span(3, 5), machines)
    assert isinstance(plan, BuildPlan)
    assert [each.span for each in plan.spans] == [Span(3, 5)]


def domains(operator: str, address: str) -> frozenset[DeclaredDomain]:
    return declared_domains([f"/ip4/{address}/tcp/1"], operator)


@pytest.mark.parametrize(
    ("operator", "address", "gb_per_s", "expected"),
    [
        ("two", "9.9.9.9", 80, "other"),
        ("one", "9.9.9.9", 80, "near"),
        # The operator counts for more than the subnet, the machine for more than the operator.
        ("two", "8.8.8.7", 80, "other"),
        ("two", "9.9.9.9", 20, "near"),
    ],
)
def test_a_replica_is_held_by_machines_that_do_not_fail_with_the_first(
    operator: str, address: str, gb_per_s: float, expected: str
) -> None:
    holder = domains("one", "8.8.8.8")
    machines = [
        machine("near", 9, 100, domains=domains("one", "8.8.8.9")),
        machine("other", 9, gb_per_s, domains=domains(operator, address)),
    ]
    plan = plan_replica(shape(8), Span(0, 8), machines, [holder])
    assert isinstance(plan, BuildPlan)
    assert [each.peer for each in plan.spans] == [expected]


def test_a_replica_is_held_by_any_machine_where_others_lack_memory() -> None:
    one = domains("one", "8.8.8.8")
    machines = [
        machine("same", 9, 100, domains=one),
        machine("small", 5, 100, domains=domains("two", "9.9.9.9")),
    ]
    plan = plan_replica(shape(8), Span(0, 8), machines, [one])
    assert isinstance(plan, BuildPlan)
    assert [each.peer for each in plan.spans] == ["same"]
    assert isinstance(plan_replica(shape(20), Span(0, 20), machines, [one]), BuildShortage)


@pytest.mark.parametrize(
    ("quality", "kinds"), [("exact", set()), ("high", {"int8"}), ("balanced", {"int8"})]
)
def test_coarser_weights_only_as_far_as_allowed(quality: str, kinds: set[str]) -> None:
    # 8 blocks take 8.8 GB as they are, 4.8 in int8.
    machines = [machine("a", 5, 50)]
    plan = plan_build(shape(8), Span(0, 8), machines, quality=quality)  # type: ignore[arg-type]
    found = {each.quant_type for each in plan.spans} if isinstance(plan, BuildPlan) else set()
    assert found == kinds


def test_weights_stay_precise_where_coarser_ones_save_little() -> None:
    fast = machine("a", 100, 1e5)
    plan = plan_build(shape(8), Span(0, 8), [fast], quality="balanced")
    assert isinstance(plan, BuildPlan)
    assert plan.spans[0].quant_type == "none"


def test_coarser_weights_make_a_chain_shorter() -> None:
    machines = [machine(name, 5, 2000) for name in "abcd"]
    plan = plan_build(shape(8), Span(0, 8), machines, quality="high")
    assert isinstance(plan, BuildPlan)
    assert [each.quant_type for each in plan.spans] == ["int8"]


def test_a_quantization_that_an_operator_forbids_is_not_planned() -> None:
    machines = [machine("a", 5, 50, quant_types=("none",))]
    plan = plan_build(shape(8), Span(0, 8), machines, quality="high")
    assert isinstance(plan, BuildShortage)


def test_a_shortage_names_the_smallest_addition() -> None:
    machines = [machine("a", 5, 50)]  # 4 of 8 blocks
    shortage = plan_build(shape(8), Span(0, 8), machines)
    assert isinstance(shortage, BuildShortage)
    assert shortage.missing_bytes == 4 * (GB + CACHE_BYTES)
    assert shortage.advice == (
        "one more machine with 4.4 GB free for models, or --quality high (int8)"
    )
    more = [*machines, machine("b", 4.4, 50)]
    assert isinstance(plan_build(shape(8), Span(0, 8), more), BuildPlan)


def test_a_model_that_cannot_be_quantized_is_planned_as_it_is() -> None:
    plain = ModelShape(
        "org/model", {"none": (GB,) * 4}, {"none": (BlockWork(GB, GB),) * 4}, 8192, CACHE_BYTES
    )
    shortage = plan_build(plain, Span(0, 4), [machine("a", 2, 50)], quality="balanced")
    assert isinstance(shortage, BuildShortage)
    assert shortage.advice == "one more machine with 3.3 GB free for models"
    assert isinstance(plan_build(plain, Span(0, 4), [machine("a", 5, 50)]), BuildPlan)


def test_without_machines_all_is_missing() -> None:
    shortage = plan_build(shape(2), Span(0, 2), [], quality="balanced")
    assert isinstance(shortage, BuildShortage)
    assert shortage.advice == "one more machine with 0.7 GB free for models"


def test_small_machines_are_enough_if_there_are_many() -> None:
    rng = np.random.default_rng(0)
    machines = [machine(f"m{i}", float(rng.uniform(1, 3)), 50) for i in range(1000)]
    plan = plan_build(shape(80), Span(0, 80), machines)
    assert isinstance(plan, BuildPlan)
    check(plan, machines, Span(0, 80))
