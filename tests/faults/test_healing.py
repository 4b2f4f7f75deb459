"""Blocks lose their only holder, and a node that can be spared goes there by itself."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from nesa_node.core.ids import Span
from tests.client.local_models import random_ids
from tests.faults.bed import Bed
from tests.faults.movers import mover_config, open_moving_process
from tests.faults.runs import Blow, join_bed, run_with_blow
from tests.faults.test_leaving import peers_in_directory
from tests.faults.waiting import span_of, wait_until

LOW, HIGH = Span(0, 3), Span(3, 6)
SOON = ("--record-ttl-s", "3", "--rebalance-every-s", "0.5")


def test_spare_node_fills_the_hole_and_the_session_goes_on(
    alone: PreTrainedModel, bed: Bed
) -> None:
    """Its own blocks a pinned node holds too, which stays."""
    [victim] = bed.start([HIGH], *SOON)
    spare = bed.wait_for(bed.launch(3, *SOON))
    [low] = bed.start([LOW], *SOON)
    assert span_of(spare) == LOW
    with join_bed(bed, "chain") as model, model.inference_session(128) as session:
        blow = Blow(after=5, strike=lambda: bed.kill(victim))
        run_with_blow(alone, model, session, random_ids(1, 20), blow, "hole filled by a spare")
        assert [hop.peer_id for hop in session.hops] == [low.peer_id, spare.peer_id]
    assert span_of(spare) == HIGH
    assert span_of(low) == LOW


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_one_of_several_spare_nodes_moves(bed: Bed) -> None:
    """The second and third find nothing but the lower blocks to serve, as the first did."""
    bed.start([HIGH] * 4, *SOON)
    spares = [bed.wait_for(bed.launch(3, *SOON)) for _ in range(3)]
    assert [span_of(node) for node in spares] == [LOW] * 3
    bed.kill(*(node for node in bed.nodes if node.span == HIGH))
    wait_until(lambda: any(span_of(node) == HIGH for node in spares))
    time.sleep(3.0)
    assert sorted(filter(None, map(span_of, spares))) == [LOW, LOW, HIGH]


@pytest.mark.slow
def test_node_that_may_not_move_does_not(bed: Bed) -> None:
    [victim] = bed.start([HIGH], *SOON)
    bound = bed.wait_for(bed.launch(3, "--max-moves-per-hour", "0", *SOON))
    [pinned] = bed.start([LOW], *SOON)
    bed.kill(victim)
    wait_until(lambda: "blocks_unheld" in bound.log())
    time.sleep(2.0)
    for node in (bound, pinned):
        assert span_of(node) == LOW
        assert "move_started" not in node.log()
    assert "blocks_unheld" not in pinned.log()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("tenths", [0, 1, 2, 3, 5, 8, 12])
def test_node_is_stopped_while_it_moves(bed: Bed, tmp_path: Path, tenths: int) -> None:
    """While it looks around, waits for a session that does nothing, loads, and measures."""
    bed.start([HIGH])
    config = mover_config(bed, LOW, tmp_path, drain_timeout_s=8)
    with (
        open_moving_process(config, tmp_path / "mover.log") as moving,
        join_bed(bed, "chain") as model,
        model.inference_session(64) as session,
    ):
        if tenths % 2:
            session.step(random_ids(1, 5))
        bed.start([LOW])
        moving.tell(HIGH)
        time.sleep(tenths / 10)
        moving.process.send_signal(signal.SIGTERM)
        assert moving.process.wait(45) == 0, moving.log_path.read_text()
        assert not moving.ready_path.exists()
    assert peers_in_directory(bed.addresses) == {node.peer_id for node in bed.nodes}
