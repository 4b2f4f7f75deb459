from dataclasses import replace

import numpy as np
import pytest

from benchmarks.gating import ReplayedSwarm, Source, follow, judge_move, true_score
from benchmarks.toy_plans import UNSERVED_S
from benchmarks.traces import TraceEvent, TraceSettings, TraceStep
from nesa_node.server.orchestrator.planner import PlacementDecision
from nesa_node.swarm.dht.sealing import AnnouncedMove

SMALL = Source("small", TraceSettings(nodes=24, regions=4, churn=0.0, jitter=0.02, drift=0.0))


def _first_step() -> TraceStep:
    return next(SMALL.trace(1, 0, None))


def test_nodes_that_are_asked_to_move_load_for_one_look() -> None:
    swarm, step = ReplayedSwarm(SMALL.capacities, settled=False), _first_step()
    node = swarm.look(step, ()).nodes[0]
    span = (node.span.start, node.span.end)
    to = (0, len(node.span)) if span[0] else (len(node.span), 2 * len(node.span))
    move = AnnouncedMove(peer=node.peer_id, was=span, to=to, gain=0.2)
    during = swarm.look(replace(step, at=1), (move,))
    assert [each.peer_id for each in during.joining] == [node.peer_id]
    assert during.joining[0].span == move.span
    after = swarm.look(replace(step, at=2), (move,))
    assert (after.joining, after.nodes[0].span) == ((), move.span)


def test_settled_swarms_begin_better_placed_than_nodes_choose() -> None:
    step, latencies = _first_step(), []
    for settled in (True, False):
        swarm = ReplayedSwarm(SMALL.capacities, settled=settled)
        swarm.look(step, ())
        latencies.append(true_score(swarm, step).latency_s)
    assert latencies[0] < latencies[1]


def test_a_move_is_false_if_the_true_round_trips_show_no_gain() -> None:
    swarm, step = ReplayedSwarm(SMALL.capacities, settled=True), _first_step()
    node = swarm.look(step, ()).nodes[0]
    span = (node.span.start, node.span.end)
    move = AnnouncedMove(peer=node.peer_id, was=span, to=span, gain=0.2)
    idle = PlacementDecision(reason="")
    claimed = replace(idle, moves=(move,), trigger="gain")
    assert judge_move(swarm, step, idle, ()) == ""
    assert judge_move(swarm, step, claimed, ()) == "false"
    assert judge_move(swarm, step, replace(claimed, trigger="spread"), ()) == "false"
    assert judge_move(swarm, step, replace(claimed, trigger="hole"), ()) == "for a loss"
    assert judge_move(swarm, step, claimed, (move,)) == ""  # counted when it was new
    free_NN = np.full_like(step.true_s_NN, 1e-4)
    np.fill_diagonal(free_NN, 0.0)
    far = ReplayedSwarm(SMALL.capacities, settled=False)
    far.look(step, ())
    assert (
        true_score(far, replace(step, true_s_NN=free_NN)).latency_s
        < true_score(far, step).latency_s
    )


@pytest.mark.parametrize(("gate", "is_found"), [("gated", True), ("no triggers", False)])
def test_triggers_find_a_partition_before_time_does(gate: str, is_found: bool) -> None:
    event = TraceEvent(kind="partition", at=15)
    done = [one for _, one in follow(gate, SMALL, 17, 0, event)]
    assert done[0]["planned"]
    assert any(one["planned"] and not one["timed"] for one in done[15:]) == is_found
    assert sum(one["planned"] for one in done) <= 4
    assert all(one["cost_s"] < UNSERVED_S for one in done)
