"""Spans of machines that serve nothing yet: which machines hold a model, how much, how precise.

B blocks, N machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.choices import PlacementGoal, PoolQuantType, WeightQuality
from nesa_node.topology.roofline import BlockWork, WeightFigures
from nesa_node.topology.shape.failure_domains import DeclaredDomain
from nesa_node.topology.snapshot import zero_runs

QUANT_TYPES_OF_QUALITY: Mapping[WeightQuality, tuple[PoolQuantType, ...]] = {
    "exact": ("none",),
    "high": ("none", "int8"),
    "balanced": ("none", "int8", "nf4"),
}
"""Quantizations that a quality allows, most precise first."""
HOP_S = 0.02
"""Assumed time of a hop to a machine whose round trip nothing has measured yet."""
HOP_OVERHEAD_S = 0.001
"""Time to receive and send, beside the round trip (`python -m benchmarks hop`)."""
MAX_APART_COST = 1.5
"""Cost of a plan by machines that do not fail with present holders, as a multiple of the best's."""
_MAX_CANDIDATES = 48
_GB = 10**9


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's blocks take, by quantization: bytes in memory, and work of one token.

    `cache_bytes` are those of `cache_tokens` tokens in one block, `head` is the work of a token at
    the client. Quantizations that cannot hold the model are missing. `block_files` are each block's
    files on the hub, with their bytes: a machine downloads whole files. Empty for a folder.
    """

    name: str
    block_bytes: Mapping[PoolQuantType, tuple[int, ...]]
    work: Mapping[PoolQuantType, tuple[BlockWork, ...]]
    cache_tokens: int
    cache_bytes: int
    dtype: str = "bfloat16"
    head: BlockWork = field(default_factory=lambda: BlockWork(0.0, 0.0))
    family: str = ""
    block_files: tuple[Mapping[str, int], ...] = ()

    def kind(self, quant_type: PoolQuantType) -> str:
        """The kind of weights by which figures of devices are listed."""
        return self.dtype if quant_type == "none" else quant_type

    @property
    def num_blocks(self) -> int:
        return len(self.block_bytes["none"])

    def held_bytes(self, span: Span, quant_type: PoolQuantType) -> int:
        """Bytes of a span's weights and KV cache."""
        weights = self.block_bytes[quant_type][span.start : span.end]
        return sum(weights) + len(span) * self.cache_bytes

    def download_bytes(self, span: Span) -> int:
        """Bytes of the files that a machine downloads for a span, if it has none of them."""
        files: dict[str, int] = {}
        for block_files in self.block_files[span.start : span.end]:
            files.update(block_files)
        return sum(files.values())

    @property
    def least_download_bytes(self) -> int:
        """Bytes of the files of the block that takes the fewest."""
        return min((sum(files.values()) for files in self.block_files), default=0)

    def downloadable_blocks(self, span: Span, most_bytes: int | None) -> int:
        """Number of blocks of which any adjacent ones within `span` take at most `most_bytes`."""
        if most_bytes is None or not self.block_files:
            return len(span)
        end, fewest = span.start, len(span)
        for start in range(span.start, span.end):
            end = max(end, start)
            while end < span.end and self.download_bytes(Span(start, end + 1)) <= most_bytes:
                end += 1
            if end == span.end:
                break
            fewest = min(fewest, end - start)
        return fewest


@dataclass(frozen=True, slots=True)
class PoolMachine:
    """A machine as its offer describes it. `figures` are by kind: a dtype, "int8" or "nf4".

    `hop_s` is the time that a step spends on the way to the machine and back, half of it each.
    `max_download_bytes` bounds the files that it downloads for the model. `domains` are those that
    its offer declares.
    """

    peer: PeerId
    memory_bytes: int
    figures: Mapping[str, WeightFigures]
    quant_types: tuple[PoolQuantType, ...] = ("none", "int8", "nf4")
    hop_s: float = HOP_S
    max_download_bytes: int | None = None
    domains: frozenset[DeclaredDomain] = frozenset()

    def figures_for(self, shape: ModelShape, quant_type: PoolQuantType) -> WeightFigures | None:
        """None if the machine may not, or was not measured to, hold such weights."""
        if quant_type not in self.quant_types:
            return None
        return self.figures.get(shape.kind(quant_type))


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """Blocks that a machine is to hold, and the seconds that one token is predicted to take."""

    peer: PeerId
    span: Span
    quant_type: PoolQuantType
    step_s: float
    hop_s: float


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Machines that hold adjacent spans, in order."""

    spans: tuple[PlannedSpan, ...]

    @property
    def step_s(self) -> float:
        """Predicted seconds of a decode step of one sequence, hops included."""
        return sum(each.step_s + each.hop_s for each in self.spans)

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest span: 1 / this is the throughput of many sequences."""
        return max(each.step_s for each in self.spans)

    def cost_s(self, goal: PlacementGoal) -> float:
        """What a plan is judged by; of equally fast ones the shorter chain wins."""
        return self.step_s if goal == "latency" else self.slowest_s + 1e-4 * len(self.spans)


@dataclass(frozen=True, slots=True)
class BuildShortage:
    """Why no plan exists, and the smallest addition that would help."""

    missing_bytes: int
    advice: str


def missing_spans(holders_B: Sequence[int], replicas: int) -> Iterator[Span]:
    """The spans that lack a holder, for the first replica, then for the second, and so on."""
    for replica in range(replicas):
        yield from zero_runs([max(holders - replica, 0) for holders in holders_B])


def plan_replica(
    shape: ModelShape,
    span: Span,
    machines: Sequence[PoolMachine],
    holders: Iterable[frozenset[DeclaredDomain]],
    *,
    quality: WeightQuality = "exact",
    goal: PlacementGoal = "latency",
) -> BuildPlan | BuildShortage:
    """As `plan_build`, by machines that share no declared failure domain with present holders.

    `holders` are each holder's domains. Where such machines lack memory, or cost more than
    `MAX_APART_COST`, the same subnet is allowed, then the same operator, then all.
    """
    best = plan_build(shape, span, machines, quality=quality, goal=goal)
    held = frozenset[DeclaredDomain]().union(*holders)
    if isinstance(best, BuildShortage) or not held:
        return best
    for kinds in (("machine", "operator", "subnet"), ("machine", "operator"), ("machine",)):
        shared = {domain for domain in held if domain[0] in kinds}
        apart = [machine for machine in machines if not machine.domains & shared]
        plan = plan_build(shape, span, apart, quality=quality, goal=goal)
        if isinstance(plan, BuildPlan) and plan.cost_s(goal) <= MAX_APART_COST * best.cost_s(goal):
            return plan
    return best


def plan_build(
    shape: ModelShape,
    span: Span,
    machines: Sequence[PoolMachine],
    *,
    quality: WeightQuality = "exact",
    goal: PlacementGoal = "latency",
) -> BuildPlan | BuildShortage:
    """Choose machines that together hold `span`, and their shares.

    The most precise weights that `quality` allows are taken, unless only coarser ones fit or make
    the chain shorter.
    """
    best: BuildPlan | None = None
    allowed = [each for each in QUANT_TYPES_OF_QUALITY[quality] if each in shape.block_bytes]
    for quant_type in allowed:
        plan = _plan_quantized(shape, span, machines, quant_type, goal)
        if plan is not None and (
            best is None
            or (len(plan.spans) < len(best.spans) and plan.cost_s(goal) < best.cost_s(goal))
        ):
            best = plan
    return best or _describe_shortage(shape, span, machines, allowed)


@dataclass(frozen=True, slots=True)
class _Candidate:
    peer: PeerId
    blocks: int
    """That fit."""
    block_s: float
    hop_s: float


def _candidates(
    shape: ModelShape, span: Span, machines: Sequence[PoolMachine], quant_type: PoolQuantType
) -> list[_Candidate]:
    """Machines that hold at least one block, sized by the largest and timed by the mean block."""
    largest = max(shape.block_bytes[quant_type][span.start : span.end]) + shape.cache_bytes
    work = shape.work[quant_type][span.start : span.end]
    limits = {machine.max_download_bytes for machine in machines}
    most = {limit: shape.downloadable_blocks(span, limit) for limit in limits}
    found = []
    for machine in machines:
        figures = machine.figures_for(shape, quant_type)
        blocks = min(machine.memory_bytes // largest, most[machine.max_download_bytes])
        if figures is not None and blocks:
            block_s = sum(figures.block_s(each, 1) for each in work) / len(work)
            hop_s = machine.hop_s + figures.wakeup_s
            found.append(_Candidate(machine.peer, int(blocks), block_s, hop_s))
    return found


def _plan_quantized(
    shape: ModelShape,
    span: Span,
    machines: Sequence[PoolMachine],
    quant_type: PoolQuantType,
    goal: PlacementGoal,
) -> BuildPlan | None:
    """The best plan over all numbers of machines, with weights of one kind."""
    found = _candidates(shape, span, machines, quant_type)
    # The largest to need few hops, the fastest to need little time.
    largest = sorted(found, key=lambda each: (-each.blocks, each.block_s, each.peer))
    fastest = sorted(found, key=lambda each: (each.block_s, -each.blocks, each.peer))
    half = _MAX_CANDIDATES // 2
    few = list(dict.fromkeys((*largest[:half], *fastest[:half])))
    if sum(each.blocks for each in few) < len(span):
        few = found
    few.sort(key=lambda each: (-each.blocks, each.block_s, each.peer))
    best: BuildPlan | None = None
    for count in range(1, len(few) + 1):
        if sum(each.blocks for each in few[:count]) < len(span):
            continue
        plan = _make_plan(few[:count], span, quant_type, goal)
        if best is None or plan.cost_s(goal) < best.cost_s(goal):
            best = plan
    return best


def _make_plan(
    chosen: Sequence[_Candidate], span: Span, quant_type: PoolQuantType, goal: PlacementGoal
) -> BuildPlan:
    """Give each machine its share: the fastest as much as fits, or all the same time.

    A machine of whose share nothing is left has no part in the plan.
    """
    ordered = sorted(chosen, key=lambda each: (each.block_s, each.peer))
    shares = _fill(ordered, len(span)) if goal == "latency" else _balance(ordered, len(span))
    spans, start = [], span.start
    for each, share in zip(ordered, shares, strict=True):
        if share:
            part = Span(start, start + share)
            spans.append(PlannedSpan(each.peer, part, quant_type, share * each.block_s, each.hop_s))
            start = part.end
    return BuildPlan(tuple(spans))


def _fill(ordered: Sequence[_Candidate], blocks: int) -> list[int]:
    shares = []
    for each in ordered:
        shares.append(min(each.blocks, blocks))
        blocks -= shares[-1]
    return shares


def _balance(ordered: Sequence[_Candidate], blocks: int) -> list[int]:
    """Shares of which the slowest takes the least time, by bisection over that time."""

    def shares_within(seconds: float) -> list[int]:
        return [min(each.blocks, math.floor(seconds / each.block_s)) for each in ordered]

    low, high = 0.0, blocks * max(each.block_s for each in ordered)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(shares_within(middle)) >= blocks else (middle, high)
    shares = shares_within(high)
    # Of several that end at the same time, the slowest give up what is too much.
    for index in reversed(range(len(shares))):
        excess = sum(shares) - blocks
        shares[index] -= min(excess, shares[index])
    return shares


def _describe_shortage(
    shape: ModelShape,
    span: Span,
    machines: Sequence[PoolMachine],
    allowed: Sequence[PoolQuantType],
) -> BuildShortage:
    """The smallest addition: memory at the coarsest allowed weights, or a lower quality."""
    coarsest = allowed[-1]
    missing = _missing_bytes(shape, span, machines, coarsest)
    advice = f"one more machine with {_format_gb(missing)} free for models"
    for quality, quant_types in QUANT_TYPES_OF_QUALITY.items():
        coarser = [
            each for each in quant_types if each in shape.block_bytes and each not in allowed
        ]
        if coarser and not _missing_bytes(shape, span, machines, coarser[-1]):
            advice += f", or --quality {quality} ({coarser[-1]})"
            break
    return BuildShortage(missing, advice)


def _missing_bytes(
    shape: ModelShape, span: Span, machines: Sequence[PoolMachine], quant_type: PoolQuantType
) -> int:
    """Bytes of the blocks of `span` for which no machine has room."""
    held = sum(each.blocks for each in _candidates(shape, span, machines, quant_type))
    return shape.held_bytes(Span(min(span.start + held, span.end), span.end), quant_type)


def _format_gb(count: int) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB // 10 else f"{count / 10**6:.0f} MB"
