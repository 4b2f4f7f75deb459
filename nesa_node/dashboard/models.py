"""Models of a swarm, summarized from the records of their nodes."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.span import Span
from nesa_node.dashboard.events import DashboardEvent
from nesa_node.dashboard.node_tracker import TrackedNode
from nesa_node.swarm.dht.records import majority_num_blocks

MAX_MODELS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """Summary of one model. `runs` are (start, end, holders), cut where the holders change.

    `tokens_per_s` and `sessions` are estimates: the sum of the nodes' counts, each weighted by its
    share of the blocks, since a token or session passes each block once. `lost` counts nodes with
    an expired record, `failing` announced nodes that do not work, which count as no holders.
    """

    model_id: ModelId
    name: str
    num_blocks: int
    runs: tuple[tuple[int, int, int], ...]
    nodes: int
    serving: int
    failing: int
    lost: int
    tokens_per_s: float
    sessions: float

    @property
    def holes(self) -> tuple[Span, ...]:
        return tuple(Span(start, end) for start, end, holders in self.runs if not holders)


def summarize_models(nodes: Mapping[PeerId, TrackedNode]) -> list[ModelSummary]:
    """Summarize the models with the most present nodes, at most `MAX_MODELS`."""
    groups: dict[ModelId, list[TrackedNode]] = defaultdict(list)
    for sighting in nodes.values():
        groups[ModelId(sighting.record.model_id)].append(sighting)
    alive = {
        model: sum(sighting.lost_at is None for sighting in group)
        for model, group in groups.items()
    }
    chosen = sorted(groups, key=lambda model: (-alive[model], model))[:MAX_MODELS]
    return [_summarize_model(model, groups[model]) for model in chosen]


def _summarize_model(model: ModelId, group: list[TrackedNode]) -> ModelSummary:
    there = [sighting for sighting in group if sighting.lost_at is None]
    records = [sighting.record for sighting in there or group]
    num_blocks = majority_num_blocks(records)
    names = Counter(record.model_name for record in records)
    agreed = [sighting for sighting in there if sighting.record.num_blocks == num_blocks]
    serving = [
        sighting
        for sighting in agreed
        if sighting.record.state == "serving" and sighting.failing_since is None
    ]

    def weighed(values: Iterable[tuple[float, tuple[int, int]]]) -> float:
        return sum(value * (end - start) for value, (start, end) in values) / num_blocks

    return ModelSummary(
        model_id=model,
        name=max(names, key=lambda name: (names[name], name)),
        num_blocks=num_blocks,
        runs=coverage_runs((sighting.record.span for sighting in serving), num_blocks),
        nodes=len(there),
        serving=len(serving),
        failing=sum(sighting.failing_since is not None for sighting in there),
        lost=len(group) - len(there),
        tokens_per_s=weighed((each.tokens_per_s, each.record.span) for each in agreed),
        sessions=weighed((each.record.sessions, each.record.span) for each in agreed),
    )


def coverage_runs(
    spans: Iterable[tuple[int, int]], num_blocks: int
) -> tuple[tuple[int, int, int], ...]:
    """Runs of blocks with an equal number of `spans`; at most twice as many as spans, plus one."""
    steps: Counter[int] = Counter({0: 0, num_blocks: 0})
    for start, end in spans:
        steps[start] += 1
        steps[end] -= 1
    cuts = sorted(at for at in steps if 0 <= at <= num_blocks)
    runs: list[tuple[int, int, int]] = []
    holders = 0
    for start, end in itertools.pairwise(cuts):
        holders += steps[start]
        if runs and runs[-1][2] == holders:
            runs[-1] = (runs[-1][0], end, holders)
        else:
            runs.append((start, end, holders))
    return tuple(runs)


class HoleTracker:
    """Reports when blocks lose their last holder, and when all blocks have one again."""

    def __init__(self) -> None:
        self._holes: dict[ModelId, tuple[Span, ...]] = {}

    def update_models(self, models: Iterable[ModelSummary], now: float) -> list[DashboardEvent]:
        """Events for changed holes; holes of a new model are no event, since it may be starting."""
        events: list[DashboardEvent] = []
        seen: dict[ModelId, tuple[Span, ...]] = {}
        for model in models:
            seen[model.model_id] = model.holes
            before = self._holes.get(model.model_id, model.holes)
            if model.holes == before:
                continue
            if model.holes:
                spans = ", ".join(str(hole) for hole in model.holes[:5])
                words = f"Blocks {spans} of {model.name} have no holder"
                events.append(DashboardEvent(at=now, kind="hole", text=words, model=model.model_id))
            else:
                words = f"Every block of {model.name} has a holder"
                events.append(
                    DashboardEvent(at=now, kind="healed", text=words, model=model.model_id)
                )
        self._holes = seen
        return events
