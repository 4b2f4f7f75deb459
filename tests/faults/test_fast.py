"""The three faults that every run of the tests goes through; the other files here are slow."""

from __future__ import annotations

import threading
import time

import pytest
from transformers import PreTrainedModel

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.settings.choices import RouteName
from nesa_node.core.wait_tracking import WaitStatus, WaitTracker
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS
from tests.faults.bed import Bed
from tests.faults.runs import ROUTES, Blow, generate, holders, join_bed, run_with_blow
from tests.joining_node import joining
from tests.swarms import thirds

FIRST, MIDDLE, LAST = thirds(BLOCKS)
REFUSED_S = 6.0
"""Three looks at the swarm, on a busy machine."""
RECOVERY_S = 5.0


@pytest.mark.parametrize("routing", ROUTES)
def test_killed_middle_node_is_replaced(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
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


def test_missing_blocks_are_refused_at_once_where_nobody_joins_with_them(bed: Bed) -> None:
    bed.start([FIRST, LAST])
    with join_bed(bed, "chain") as model:
        model.join()
        began = time.monotonic()
        with pytest.raises(MissingBlocksError, match="none is joining") as failure:
            model.inference_session(128)
        assert time.monotonic() - began < REFUSED_S
    assert failure.value.missing == ((MIDDLE.start, MIDDLE.end),)


def test_session_waits_for_a_node_that_is_joining_and_says_so(bed: Bed) -> None:
    bed.start([FIRST, LAST])
    waits = WaitTracker()
    told: list[WaitStatus | None] = []
    with (
        join_bed(bed, "chain", recovery_timeout_s=RECOVERY_S) as model,
        joining(bed.addresses, MIDDLE) as peer,
        waits.activate(),
    ):
        model.join()
        asking = threading.Timer(RECOVERY_S - 1, lambda: told.append(waits.slow_wait()))
        asking.start()
        with pytest.raises(MissingBlocksError, match="waited 5 s"):
            model.inference_session(128)
        asking.join()
    (wait,) = told
    assert wait is not None
    assert (wait.what, wait.blocks, wait.peers) == ("a node that is joining", (MIDDLE,), (peer,))
    assert RECOVERY_S - 1 < (wait.limit_s or 0.0) < RECOVERY_S + 2
