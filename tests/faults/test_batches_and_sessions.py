"""Kills in padded batches, after rollbacks, and between the generations of one session."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from nesa_node.core.settings.choices import RouteName
from tests.client.local_models import left_padded, random_ids
from tests.engine.tiny_models import BLOCKS
from tests.faults.bed import Bed
from tests.faults.runs import (
    ROUTES,
    Blow,
    assert_undisturbed,
    generate,
    holders,
    join_bed,
    run_with_blow,
)
from tests.swarms import thirds

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("routing", ROUTES)
def test_kill_during_a_padded_batch(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hop: int
) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]])
    ids_BL, mask_BL = left_padded([5, 17, 11], seed=hop)
    with join_bed(bed, routing) as model, model.inference_session(128, 3) as session:
        victim = holders(bed, session)[hop]
        blow = Blow(after=10 + hop, strike=lambda: bed.kill(victim))
        run_with_blow(alone, model, session, ids_BL, blow, f"batch of 3, {routing}", mask_BL)


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("routing", ROUTES)
def test_kill_after_a_rollback(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hop: int
) -> None:
    """What was rolled back must not come back with a replay."""
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]])
    ids_BL = random_ids(1, 20, seed=hop)
    with join_bed(bed, routing) as model, model.inference_session(200) as session:
        output_BL = generate(model, ids_BL, session, new_tokens=20)
        session.rollback([33])
        other_BL = torch.cat([output_BL[:, :33], random_ids(1, 9, seed=50)], 1)
        victim = holders(bed, session)[hop]
        blow = Blow(after=10, strike=lambda: bed.kill(victim))
        run_with_blow(alone, model, session, other_BL, blow, f"after a rollback, {routing}")


@pytest.mark.parametrize("lengths", [[0, 0, 0], [5, 17, 11], [8, 3, 20]])
@pytest.mark.parametrize("routing", ROUTES)
def test_rollback_of_a_session_that_has_lost_a_node(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, lengths: list[int]
) -> None:
    middle = thirds(BLOCKS)[1]
    bed.start([*thirds(BLOCKS), middle])
    rows = [random_ids(1, 24, seed=row)[0] for row in range(3)]
    with join_bed(bed, routing) as model, model.inference_session(128, 3) as session:
        session.feed([ids_L[:20] for ids_L in rows])
        session.feed([ids_L[20:] for ids_L in rows])
        bed.kill(holders(bed, session)[1])
        session.rollback(lengths)
        rest = [ids_L[length:] for ids_L, length in zip(rows, lengths, strict=True)]
        hidden_TD = session.feed(rest, "last")
        ours_BV = session.ends.head(hidden_TD)
        theirs_BV = alone(torch.stack(rows)).logits[:, -1].detach()
        assert (ours_BV - theirs_BV).abs().max() <= 1e-4 * theirs_BV.abs().max()


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("routing", ROUTES)
def test_kill_around_the_second_generation_of_a_session(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, when: str, hop: int
) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]])
    ids_BL = random_ids(1, 20, seed=hop)
    with join_bed(bed, routing) as model, model.inference_session(256) as session:
        output_BL = generate(model, ids_BL, session)
        assert_undisturbed(alone, output_BL, ids_BL)
        turn_BL = torch.cat([output_BL, random_ids(1, 7, seed=60)], 1)
        victim = holders(bed, session)[hop]
        blow = Blow(after=0 if when == "before" else 12, strike=lambda: bed.kill(victim))
        run_with_blow(alone, model, session, turn_BL, blow, f"second generation, {routing}")


@pytest.mark.parametrize("routing", ROUTES)
def test_one_session_survives_the_loss_of_every_node_in_turn(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    bed.start(thirds(BLOCKS) * 2)
    ids_BL = random_ids(1, 20)
    with join_bed(bed, routing) as model, model.inference_session(256) as session:
        for hop in (1, 0, 2):
            victim = holders(bed, session)[hop]
            blow = Blow(after=9, strike=partial(bed.kill, victim))
            ids_BL = run_with_blow(
                alone, model, session, ids_BL, blow, f"in turn, {routing}", new_tokens=20
            )
