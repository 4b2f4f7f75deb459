"""The three faults that every run of the tests goes through; the other files here are slow."""

from __future__ import annotations

import time

import pytest
from transformers import PreTrainedModel

from nesa_node.core.choices import Route
from nesa_node.core.errors import MissingBlocksError
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS
from tests.faults.bed import Bed
from tests.faults.runs import ROUTES, Blow, generate, holders, join_bed, run_with_blow
from tests.swarms import thirds

FIRST, MIDDLE, LAST = thirds(BLOCKS)


@pytest.mark.parametrize("routing", ROUTES)
def test_killed_middle_node_is_replaced(alone: PreTrainedModel, bed: Bed, routing: Route) -> None:
    bed.start([FIRST, MIDDLE, LAST, MIDDLE])
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        victim = holders(bed, session)[1]
        blow = Blow(after=13, strike=lambda: bed.kill(victim))
        run_with_blow(
            alone, model, session, random_ids(1, 20), blow, f"fast: node killed, {routing}"
        )


def test_lost_blocks_are_named_in_time(bed: Bed) -> None:
    bed.start([FIRST, MIDDLE, LAST])
    with (
        join_bed(bed, "chain", recovery_timeout_s=1.0) as model,
        model.inference_session(128) as session,
    ):
        victim = holders(bed, session)[1]
        blow = Blow(after=5, strike=lambda: bed.kill(victim))
        with pytest.raises(MissingBlocksError) as failure:
            generate(model, random_ids(1, 20), session, streamer=blow)
        assert time.monotonic() - blow.times[-1] < 1.0 + 5.0
    assert failure.value.missing == ((MIDDLE.start, MIDDLE.end),)
