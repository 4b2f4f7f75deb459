"""Forecasts of the next hour against persistence, and what placing replicas ahead of them gains.

Made-up traces of four weeks, a look every ten minutes. Homes are on for some hours of their day,
each with habits of its own, and now and then leave or come at other times; a third of them and data
centres are on until they fail. Round trips between regions rise in the evenings of both ends. A
control has the same shares of time without any habit. The fourth week is held out.

Forecast are the holders of each block in each region an hour ahead, and the height at which each
region joins another in the merge tree. "Seasonal" is what past days had at that time; "survival"
the share of times on, and off, that lasted an hour longer than now (Kaplan and Meier). "Product" is
what orchestrators do (`chance_here`), from the two weeks before each look. "Regression" is a
logistic one (for heights: linear) on seasonal and survival models and the time of day.

Placed ahead are blocks that lose all holders with the nodes that are more likely gone than here in
an hour, by the search of orchestrators (`RebalanceSearch.plan_ahead`), where no repair is planned.
It is compared with repairs after a loss alone, with two and three replicas wanted, and with perfect
knowledge of the next hour. Plans are repeated until nothing moves: real looks are half a minute
apart. A node that moves serves nothing until the next look. The product's days and weights were
chosen on the traces of `--seed 0`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
from sklearn.linear_model import LinearRegression, LogisticRegression

from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node.core.arrays import Bools, Floats, Ints
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.placement.moves import MoveCosts
from nesa_node.routing.placement.placement_problem import make_placement_problem
from nesa_node.routing.placement.rebalance import RebalancePolicy, RebalanceSearch
from nesa_node.topology.forecast import PAST_SLOTS, chance_here
from nesa_node.topology.shape.merge_tree import make_filtration, merge_tree
from nesa_node.topology.simulation.devices import choose_spans
from nesa_node.topology.snapshot import NodeState, Snapshot, count_holders

DEFAULTS = Options(model="70b", nodes=(32,), runs=6, seed=1)
QUICK = Options(model="70b", nodes=(20,), runs=1, seed=1)
BLOCKS = (40, 64)
"""Of the model: the nodes that are on hold these 2.6 times, or 1.6 times."""
REGIONS = 5
DAY = 144
"""Looks per day."""
DAYS = 28
HELD_OUT_DAYS = 7
HELD_OUT = (DAYS - HELD_OUT_DAYS) * DAY
AHEAD = 6
"""Looks per hour."""
PAST_DAYS = 7
MODELS = ("persistence", "seasonal", "survival", "regression", "product")


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """T looks at N nodes in R regions; `hour_TN` is the local time."""

    on_TN: Bools
    region_N: Ints
    hour_TR: Floats
    height_TR: Floats
    max_blocks_N: Ints


def make_trace(nodes: int, rng: np.random.Generator, *, habits: bool = True) -> Trace:
    looks = DAYS * DAY
    offset_R = rng.uniform(0, 24, REGIONS)
    hour_TR = (np.arange(looks)[:, None] * 24 / DAY + offset_R) % 24
    region_N = rng.integers(REGIONS, size=nodes)
    on_TN = np.zeros((looks, nodes), dtype=np.bool_)
    for node in range(nodes):
        kind = rng.random()
        if kind < 0.5:
            on_TN[:, node] = _habits(offset_R[region_N[node]], rng)
            if not habits:
                share = float(np.clip(on_TN[:, node].mean(), 0.05, 0.95))
                on_TN[:, node] = _alternate(8 * 6.0, 8 * 6.0 * (1 - share) / share, rng)
            on_TN[:, node] &= _alternate(20 * 6.0, 3.0, rng)
        else:
            on_TN[:, node] = _alternate((40 if kind < 0.7 else 200) * 6.0, 6.0, rng)
    return Trace(on_TN, region_N, hour_TR, _heights(hour_TR, rng), rng.integers(2, 9, size=nodes))


def _habits(offset_h: float, rng: np.random.Generator) -> Bools:
    """A home that is on at its own time of the day, 85 % of days, at other times in weekends."""
    on_T = np.zeros(DAYS * DAY, dtype=np.bool_)
    usual_h, length_h = rng.normal(16, 3), rng.uniform(4, 14)
    spread_h = 0.5 if rng.random() < 0.7 else 2.0
    for day in range(-1, DAYS + 1):
        if rng.random() < 0.15:
            continue
        start_h = day * 24 + usual_h - offset_h + rng.normal(0, spread_h)
        start_h -= 4 if day % 7 >= 5 else 0
        end_h = start_h + max(length_h + rng.normal(0, spread_h), 1.0)
        on_T[max(int(start_h * 6), 0) : max(int(end_h * 6), 0)] = True
    return on_T


def _alternate(mean_on: float, mean_off: float, rng: np.random.Generator) -> Bools:
    """On and off for exponential times, in looks."""
    on_T = np.zeros(DAYS * DAY, dtype=np.bool_)
    at = -rng.exponential(mean_on)
    while at < len(on_T):
        until = at + rng.exponential(mean_on)
        on_T[max(int(at), 0) : max(int(until), 0)] = True
        at = until + rng.exponential(mean_off)
    return on_T


def _heights(hour_TR: Floats, rng: np.random.Generator) -> Floats:
    """Height in ms at which each region first joins another, from round trips of every look."""
    places_R2 = rng.uniform(0, 120, (REGIONS, 2))
    base_RR = np.linalg.norm(places_R2[:, None] - places_R2, axis=2)
    busy_TR = np.exp(-0.5 * ((hour_TR - 20.5) / 2.0) ** 2)
    swing_R = rng.uniform(0.0, 0.2, REGIONS)
    noise_RR = np.zeros_like(base_RR)
    height_TR = np.empty_like(hour_TR)
    for at, busy_R in enumerate(busy_TR):
        noise_RR += 0.2 * (rng.normal(0, 0.05, noise_RR.shape) - noise_RR)
        congested_R = swing_R * busy_R
        rtt_RR = base_RR * (1 + congested_R + congested_R[:, None] + noise_RR + noise_RR.T)
        np.fill_diagonal(rtt_RR, 0.0)
        tree = merge_tree(make_filtration(np.fmin(rtt_RR, rtt_RR.T)))
        for (one, other), height in zip(tree.child_M2, tree.height_M, strict=True):
            for child in (one, other):
                if child < REGIONS:
                    height_TR[at, child] = height
    return height_TR


def seasonal(values_TX: Floats, shift: int) -> Floats:
    """Mean of the values `shift` looks later on the past days, half an hour around; [T, X]."""
    steps = len(values_TX)
    total, count = np.zeros(values_TX.shape), np.zeros((steps, 1))
    for day in range(1, PAST_DAYS + 1):
        for around in range(-3, 4):
            # All of these lie before the look itself: an hour and a half is less than a day.
            back = day * DAY - shift + around
            total[back:] += values_TX[: steps - back]
            count[back:] += 1
    return np.asarray(total / np.maximum(count, 1))


def run_lengths(on_TN: Bools) -> Ints:
    """For how many looks each node has been on, or off, [T, N]; 1 at the first."""
    length_TN = np.ones(on_TN.shape, dtype=np.int64)
    for at in range(1, len(on_TN)):
        same_N = on_TN[at] == on_TN[at - 1]
        length_TN[at] = np.where(same_N, length_TN[at - 1] + 1, 1)
    return length_TN


def survival(on_TN: Bools, until: int) -> Floats:
    """Probability that each node is on an hour later, [T, N], by how long it has been on or off.

    Shares of the looks before `until`, of all nodes; ages above a day count as a day.
    """
    age_TN = np.minimum(run_lengths(on_TN), DAY)
    later_TN = on_TN[AHEAD:until]
    now_TN, seen_TN = on_TN[: until - AHEAD], age_TN[: until - AHEAD]
    chance_TN = np.zeros(on_TN.shape)
    for state in (False, True):
        inside_TN = now_TN == state
        stays = np.bincount(seen_TN[inside_TN], later_TN[inside_TN], minlength=DAY + 1)
        all_of_age = np.bincount(seen_TN[inside_TN], minlength=DAY + 1)
        share = (stays + state) / (all_of_age + 1)
        chance_TN = np.where(on_TN == state, share[age_TN], chance_TN)
    return chance_TN


def presence_forecasts(trace: Trace, until: int) -> dict[str, Floats]:
    """Probabilities [T, N] that nodes are on in an hour; survival and regression learn before
    `until`, from which on the product's are computed."""
    on_TN = trace.on_TN
    now_TN = on_TN.astype(np.float64)
    found = {
        "persistence": now_TN,
        "seasonal": seasonal(now_TN, AHEAD),
        "survival": survival(on_TN, until),
    }
    angle_TN = (trace.hour_TR * 2 * np.pi / 24)[:, trace.region_N]
    features_TNF = np.stack(
        (
            now_TN,
            found["seasonal"],
            now_TN * found["seasonal"],
            seasonal(now_TN, 0),
            found["survival"],
            np.log(run_lengths(on_TN)),
            np.sin(angle_TN),
            np.cos(angle_TN),
        ),
        axis=2,
    )
    learnt = slice(PAST_DAYS * DAY, until - AHEAD)
    model = LogisticRegression(max_iter=1000)
    later_TN = on_TN[learnt.start + AHEAD : learnt.stop + AHEAD]
    model.fit(features_TNF[learnt].reshape(-1, features_TNF.shape[2]), later_TN.ravel())
    chance = model.predict_proba(features_TNF.reshape(-1, features_TNF.shape[2]))[:, 1]
    found["regression"] = chance.reshape(on_TN.shape)
    found["product"] = now_TN.copy()
    seen_T = np.ones(PAST_SLOTS + 1, dtype=np.bool_)
    for at in range(until, len(on_TN)):
        found["product"][at] = chance_here(on_TN[at - PAST_SLOTS : at + 1], seen_T)
    return found


def height_forecasts(trace: Trace, until: int) -> dict[str, Floats]:
    """Heights [T, R] in an hour."""
    height_TR = trace.height_TR
    at_that_time_TR, at_this_time_TR = (seasonal(height_TR, shift) for shift in (AHEAD, 0))
    found = {"persistence": height_TR, "seasonal": height_TR + at_that_time_TR - at_this_time_TR}
    found["regression"] = height_TR.copy()
    for region in range(height_TR.shape[1]):
        features_TF = np.stack(
            (height_TR[:, region], at_that_time_TR[:, region], at_this_time_TR[:, region]), axis=1
        )
        learnt = slice(PAST_DAYS * DAY, until - AHEAD)
        later_T = height_TR[learnt.start + AHEAD : learnt.stop + AHEAD, region]
        model = LinearRegression().fit(features_TF[learnt], later_T)
        found["regression"][:, region] = model.predict(features_TF)
    return found


def initial_spans(trace: Trace, blocks: int, rng: np.random.Generator) -> list[Span]:
    return choose_spans(trace.max_blocks_N, blocks, rng, np.zeros(blocks, dtype=np.int64))


def forecast_errors(
    trace: Trace, spans: Sequence[Span], chances: Mapping[str, Floats]
) -> dict[str, dict[str, float]]:
    """Root mean squared errors on held-out looks: holders of a block in a region, whether a node is
    on, and heights."""
    blocks_B = np.arange(max(span.end for span in spans))
    holds_NB = np.array([(span.start <= blocks_B) & (blocks_B < span.end) for span in spans])
    cells_NX = np.concatenate(
        [holds_NB * (trace.region_N == region)[:, None] for region in range(REGIONS)], axis=1
    ).astype(np.float64)
    now = slice(HELD_OUT, len(trace.on_TN) - AHEAD)
    later = slice(HELD_OUT + AHEAD, len(trace.on_TN))
    true_TX = trace.on_TN[later].astype(np.float64) @ cells_NX
    errors: dict[str, dict[str, float]] = {"holders": {}, "presence": {}, "heights_ms": {}}
    for model, chance_TN in chances.items():
        errors["holders"][model] = _rms(chance_TN[now] @ cells_NX - true_TX)
        errors["presence"][model] = _rms(chance_TN[now] - trace.on_TN[later])
    for model, height_TR in height_forecasts(trace, HELD_OUT).items():
        errors["heights_ms"][model] = _rms(height_TR[now] - trace.height_TR[later])
    return errors


def _rms(wrong: Floats) -> float:
    return float(np.sqrt((wrong**2).mean()))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Over the looks of a week: block-minutes without a holder, minutes with a hole, moves."""

    hole_block_minutes: float
    hole_minutes: float
    moves: int


def follow(
    trace: Trace,
    spans: Sequence[Span],
    looks: range,
    *,
    replicas: int,
    leaving_TN: Bools | None,
) -> Outcome:
    """Serve the looks with repairs at each, then with moves ahead of the nodes of `leaving_TN`."""
    held, blocks = list(spans), max(span.end for span in spans)
    stuck: tuple[Snapshot, frozenset[int]] | None = None
    loading: frozenset[int] = frozenset()
    missing = with_hole = moves = 0
    for at in looks:
        here = frozenset(np.flatnonzero(trace.on_TN[at]).tolist())
        snapshot = _snapshot(here, loading, held, trace, blocks)
        missing += snapshot.coverage().count(0)
        with_hole += 0 in snapshot.coverage()
        leaving = frozenset(
            node for node in here if leaving_TN is not None and leaving_TN[at, node]
        )
        loading = frozenset()
        if not replicas or (snapshot, leaving) == stuck:
            continue
        stuck = (snapshot, leaving)
        while planned := plan(snapshot, replicas, leaving):
            for node, span in planned.items():
                held[node] = span
            loading |= frozenset(planned)
            moves += len(planned)
            snapshot = _snapshot(here, loading, held, trace, blocks)
    return Outcome(10.0 * missing, 10.0 * with_hole, moves)


def plan(snapshot: Snapshot, replicas: int, leaving: frozenset[int]) -> dict[int, Span]:
    """The spans of the nodes that an orchestrator would move for losses now, or else soon."""
    holders = count_holders((*snapshot.nodes, *snapshot.joining), snapshot.num_blocks)
    if not snapshot.nodes or (min(holders) >= replicas and not leaving):
        return {}
    room = make_placement_problem(
        snapshot, ChainRequest(span=Span(0, snapshot.num_blocks)), replicas=replicas
    )
    loading = {node.peer_id for node in snapshot.joining}
    rows = enumerate(room.problem.peers)
    search = RebalanceSearch(
        snapshot,
        room,
        "latency",
        RebalancePolicy(),
        MoveCosts(),
        frozenset(row for row, peer in rows if peer in loading),
        leaving={row: 0.0 for row, peer in enumerate(room.problem.peers) if int(peer) in leaving},
    )
    found = search.plan_repairs() if min(holders) < replicas else None
    if min(holders) and (found is None or not found.moves):
        found = search.plan_ahead()
    return {int(move.peer_id): move.after for move in found.moves} if found else {}


def _snapshot(
    here: frozenset[int],
    loading: frozenset[int],
    held: Sequence[Span],
    trace: Trace,
    blocks: int,
) -> Snapshot:
    serving, joining = (
        tuple(_state(node, held, trace) for node in sorted(nodes))
        for nodes in (here - loading, here & loading)
    )
    return Snapshot(ModelId("trace@0"), blocks, serving, 0.0, joining)


def _state(node: int, held: Sequence[Span], trace: Trace) -> NodeState:
    return NodeState(
        PeerId(str(node)),
        held[node],
        decode_tokens_per_s=1.0,
        max_blocks=int(trace.max_blocks_N[node]),
        movable=True,
    )


def true_leavers(trace: Trace) -> Bools:
    """Nodes that are off at some look of the next hour, [T, N]."""
    leaving_TN = np.zeros(trace.on_TN.shape, dtype=np.bool_)
    for ahead in range(1, AHEAD + 1):
        leaving_TN[:-ahead] |= ~trace.on_TN[ahead:]
    return leaving_TN


def place_ahead(
    trace: Trace, spans: Sequence[Span], chances: Mapping[str, Floats]
) -> dict[str, Outcome]:
    """Outcomes of the held-out week by policy."""
    policies: dict[str, tuple[int, Bools | None]] = {
        "no moves": (0, None),
        "repairs, 2 replicas": (2, None),
        "repairs, 3 replicas": (3, None),
        "known, 2 replicas": (2, true_leavers(trace)),
    }
    for model in ("regression", "product"):
        policies[f"{model}, 2 replicas"] = (2, chances[model] < 0.5)
    held_out = range(HELD_OUT, len(trace.on_TN))
    return {
        policy: follow(trace, spans, held_out, replicas=replicas, leaving_TN=leaving_TN)
        for policy, (replicas, leaving_TN) in policies.items()
    }


def run(options: Options) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for habits in (True, False):
        errors: dict[tuple[str, str], list[float]] = defaultdict(list)
        outcomes: dict[tuple[int, str], list[Outcome]] = defaultdict(list)
        for number in range(options.runs):
            rng = np.random.default_rng((options.seed, number, habits))
            trace = make_trace(options.nodes[0], rng, habits=habits)
            chances = presence_forecasts(trace, HELD_OUT)
            for blocks in BLOCKS:
                spans = initial_spans(trace, blocks, rng)
                if blocks == BLOCKS[0]:
                    for what, of in forecast_errors(trace, spans, chances).items():
                        for model, error in of.items():
                            errors[what, model].append(error)
                for policy, outcome in place_ahead(trace, spans, chances).items():
                    outcomes[blocks, policy].append(outcome)
        world = "daily" if habits else "no habits"
        rows += [_error_row(world, *key, errors) for key in errors]
        rows += [_outcome_row(world, *key, outcomes) for key in outcomes]
    show(rows)
    return rows


def _error_row(
    world: str, what: str, model: str, errors: Mapping[tuple[str, str], Sequence[float]]
) -> dict[str, Any]:
    pairs = zip(errors[what, model], errors[what, "persistence"], strict=True)
    return {
        "part": "errors",
        "world": world,
        "what": what,
        "model": model,
        "error": mean(errors[what, model]),
        "of_persistence": mean(error / plain for error, plain in pairs),
        "runs": [{"errors": errors[what, model]}],
    }


def _outcome_row(
    world: str, blocks: int, policy: str, outcomes: Mapping[tuple[int, str], Sequence[Outcome]]
) -> dict[str, Any]:
    of = outcomes[blocks, policy]
    plain = outcomes[blocks, "repairs, 2 replicas"]
    return {
        "part": "placed",
        "world": world,
        "blocks": blocks,
        "policy": policy,
        "hole_block_minutes": mean(one.hole_block_minutes for one in of),
        "hole_minutes": mean(one.hole_minutes for one in of),
        "moves_per_day": mean(one.moves for one in of) / HELD_OUT_DAYS,
        "fewer_holes_in": sum(
            one.hole_block_minutes < other.hole_block_minutes
            for one, other in zip(of, plain, strict=True)
        ),
        "more_holes_in": sum(
            one.hole_block_minutes > other.hole_block_minutes
            for one, other in zip(of, plain, strict=True)
        ),
        "runs": [{"holes": [one.hole_block_minutes for one in of]}],
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        "Forecasts of the next hour in a held-out week: root mean squared errors",
        "traces|of|model|error|over persistence's",
        [
            (
                row["world"],
                row["what"],
                row["model"],
                f"{row['error']:.4f}",
                f"{row['of_persistence']:.3f}",
            )
            for row in rows
            if row["part"] == "errors"
        ],
    )
    print_table(
        "Placed ahead, per held-out week",
        "traces|blocks|policy|block-minutes\nwithout holder|minutes\nwith a hole|moves\nper day"
        "|fewer holes\nin|more\nin",
        [
            (
                row["world"],
                str(row["blocks"]),
                row["policy"],
                f"{row['hole_block_minutes']:.0f}",
                f"{row['hole_minutes']:.0f}",
                f"{row['moves_per_day']:.1f}",
                str(row["fewer_holes_in"]),
                str(row["more_holes_in"]),
            )
            for row in rows
            if row["part"] == "placed"
        ],
    )
