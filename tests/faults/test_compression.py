"""Kills in sessions whose hidden states are compressed on their way."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from nesa_node.core.settings.choices import RouteName
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS
from tests.faults.bed import Bed
from tests.faults.runs import ROUTES, Blow, generate, holders, join_bed, run_with_blow
from tests.swarms import thirds

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("routing", ROUTES)
def test_kill_in_a_lossless_session(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hop: int
) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]])
    ids_BL = random_ids(1, 40, seed=hop)
    with (
        join_bed(bed, routing, quality="lossless") as model,
        model.inference_session(200) as session,
    ):
        victim = holders(bed, session)[hop]
        blow = Blow(after=20, strike=lambda: bed.kill(victim))
        run_with_blow(alone, model, session, ids_BL, blow, f"lossless, {routing}")


@pytest.mark.parametrize("hop", [0, 1, 2])
def test_replacement_is_sent_what_the_dead_node_was(bed: Bed, hop: int) -> None:
    """Rounded as it was: compressed anew from what was received, it would be rounded twice."""
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]])
    ids_BL = random_ids(1, 40, seed=hop)
    with join_bed(bed, "chain", quality="int4@2:32:48") as model:
        with model.inference_session(200) as session:
            calm_BL = generate(model, ids_BL, session, new_tokens=40)
        with model.inference_session(200) as session:
            victim = holders(bed, session)[hop]
            blow = Blow(after=20, strike=lambda: bed.kill(victim))
            struck_BL = generate(model, ids_BL, session, new_tokens=40, streamer=blow)
            assert session.codecs == ("int4@2:32:48",) * 4
        blow.check()
    assert struck_BL.tolist() == calm_BL.tolist()
