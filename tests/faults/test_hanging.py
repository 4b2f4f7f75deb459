"""Nodes that hang rather than die, and nodes whose libp2p daemon dies under them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import psutil
import pytest
from transformers import PreTrainedModel

from nesa_node.core.errors import MissingBlocksError, SwarmError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import RouteName
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS
from tests.faults.bed import Bed, Node
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

STEP_TIMEOUT_S = 2.0
PING_S = 5.0
RECOVERY_TIMEOUT_S = 5.0
MARGIN_S = 5.0
NOTICED_S = 4.0
"""By a session that has a replacement. `python -m benchmarks frozen` has the distribution."""


def _node_and_p2pd(node: Node) -> list[int]:
    return [node.process.pid, node.p2pd().pid]


FROZEN: dict[str, Callable[[Node], list[int]]] = {
    "daemon": lambda node: [node.process.pid],
    "p2pd": lambda node: [node.p2pd().pid],
    "both": _node_and_p2pd,
}


@contextmanager
def _thawed_at_the_end(pids: list[int]) -> Iterator[Callable[[], None]]:
    """Yields what freezes the processes."""

    def freeze() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    try:
        yield freeze
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("what", FROZEN)
@pytest.mark.parametrize("routing", ROUTES)
def test_hanging_node_is_noticed_and_replaced(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, what: str, hop: int
) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]])
    with (
        join_bed(bed, routing, step_timeout_s=STEP_TIMEOUT_S) as model,
        model.inference_session(128) as session,
    ):
        victim = holders(bed, session)[hop]
        with _thawed_at_the_end(FROZEN[what](victim)) as freeze:
            blow = Blow(after=9, strike=freeze)
            run_with_blow(
                alone, model, session, random_ids(1, 20), blow, f"{what} frozen, {routing}"
            )
            assert victim.peer_id not in {hop.peer_id for hop in session.hops}
        # Awake again, it serves others.
        output_BL = generate(model, random_ids(1, 9), session, new_tokens=8)
        assert_undisturbed(alone, output_BL, random_ids(1, 9), new_tokens=8)
        assert victim.process.poll() is None


@pytest.mark.parametrize("routing", ROUTES)
def test_silent_node_is_replaced_long_before_a_step_is_overdue(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[1]])
    with (
        join_bed(bed, routing, step_timeout_s=120.0) as model,
        model.inference_session(128) as session,
    ):
        victim = holders(bed, session)[1]
        with _thawed_at_the_end(_node_and_p2pd(victim)) as freeze:
            blow = Blow(after=9, strike=freeze)
            run_with_blow(alone, model, session, random_ids(1, 20), blow, f"silent, {routing}")
            assert victim.peer_id not in {hop.peer_id for hop in session.hops}
            longest_s = max(after - before for before, after in pairwise(blow.times))
            assert longest_s < NOTICED_S


@pytest.mark.parametrize("routing", ROUTES)
def test_node_silent_at_a_rollback_is_replaced_at_the_next_step(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    """A rollback waits for no node."""
    prompt_BL = random_ids(1, 20)
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[1]])
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        generate(model, prompt_BL, session, new_tokens=8)
        victim = holders(bed, session)[1]
        with _thawed_at_the_end(_node_and_p2pd(victim)) as freeze:
            freeze()
            began = time.monotonic()
            session.rollback([10])
            assert time.monotonic() - began < NOTICED_S
            output_BL = generate(model, prompt_BL, session, new_tokens=8)
            assert time.monotonic() - began < 2 * NOTICED_S
            assert victim.peer_id not in {hop.peer_id for hop in session.hops}
        assert_undisturbed(alone, output_BL, prompt_BL, new_tokens=8)


@pytest.mark.parametrize("routing", ROUTES)
def test_hanging_node_without_a_replica_is_an_error_in_time(bed: Bed, routing: RouteName) -> None:
    bed.start(thirds(BLOCKS))
    with (
        join_bed(
            bed, routing, step_timeout_s=STEP_TIMEOUT_S, recovery_timeout_s=RECOVERY_TIMEOUT_S
        ) as model,
        model.inference_session(128) as session,
    ):
        victim = holders(bed, session)[1]
        with _thawed_at_the_end([victim.process.pid]) as freeze:
            blow = Blow(after=9, strike=freeze)
            with pytest.raises(MissingBlocksError) as failure:
                generate(model, random_ids(1, 20), session, streamer=blow)
            waited_s = time.monotonic() - blow.times[-1]
        assert failure.value.missing == ((2, 4),)
        assert waited_s < STEP_TIMEOUT_S + PING_S + RECOVERY_TIMEOUT_S + MARGIN_S


@pytest.mark.parametrize("routing", ROUTES)
def test_short_hang_is_waited_for(alone: PreTrainedModel, bed: Bed, routing: RouteName) -> None:
    bed.start(thirds(BLOCKS))
    with (
        join_bed(bed, routing, step_timeout_s=STEP_TIMEOUT_S) as model,
        model.inference_session(128) as session,
    ):
        victim = holders(bed, session)[1]

        def strike() -> None:
            os.kill(victim.process.pid, signal.SIGSTOP)
            time.sleep(4.0)
            os.kill(victim.process.pid, signal.SIGCONT)

        blow = Blow(after=9, strike=strike, delay_s=0.001)
        before = session.hops
        run_with_blow(alone, model, session, random_ids(1, 20), blow, "short hang")
        assert session.hops == before


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("routing", ROUTES)
def test_node_whose_p2pd_dies_ends_and_its_session_goes_on(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hop: int
) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]])
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        victim = holders(bed, session)[hop]
        p2pd = victim.p2pd()
        blow = Blow(after=9, strike=p2pd.kill)
        run_with_blow(alone, model, session, random_ids(1, 20), blow, f"p2pd killed, {routing}")
        assert victim.process.wait(8) == 5
        last_line = victim.log().splitlines()[-1]
        assert last_line == "error: libp2p's daemon (p2pd) has ended; restart this node"
        assert not victim.ready_path.exists()


def test_client_whose_p2pd_dies_joins_again_with_its_next_session(
    alone: PreTrainedModel, bed: Bed
) -> None:
    """Ten times: what the session is at when it dies is chance."""
    ids_BL = random_ids(1, 20)
    bed.start(thirds(BLOCKS))
    with join_bed(bed, "chain", recovery_timeout_s=60.0) as model:
        for _ in range(10):
            with model.inference_session(128) as session:
                output_BL = generate(model, ids_BL, session, new_tokens=8)
                (p2pd,) = (each for each in psutil.Process().children() if each.name() == "p2pd")
                p2pd.kill()
                began = time.monotonic()
                with pytest.raises(SwarmError, match="p2pd"):
                    generate(model, random_ids(1, 9), session)
                assert time.monotonic() - began < 30.0
            assert_undisturbed(alone, output_BL, ids_BL, new_tokens=8)
        with model.inference_session(128) as session:
            generate(model, ids_BL, session, new_tokens=8)


def test_p2pd_dies_while_a_node_starts(bed: Bed) -> None:
    bed.start(thirds(BLOCKS))
    for tenths in (0, 3, 6):
        starting = bed.launch(Span(2, 4))
        process = psutil.Process(starting.process.pid)
        deadline = time.monotonic() + 20
        while not process.children() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(tenths / 10)
        for child in process.children():
            child.kill()
        assert starting.process.wait(20) == 5
        last_line = starting.log_path.read_text(encoding="utf-8").splitlines()[-1]
        assert last_line.startswith("error: libp2p's daemon")
