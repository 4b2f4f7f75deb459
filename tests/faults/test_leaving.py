"""A node that is asked to leave: no session fails, it exits 0, and its record is withdrawn."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import RouteName
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.p2p.identity import Identity
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

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MIDDLE = Span(2, 4)
EXIT_S = 8.0
"""For a node without sessions to withdraw and end, on a busy machine."""


def peers_in_directory(addresses: tuple[str, ...]) -> set[str]:
    async def look() -> set[str]:
        with tempfile.TemporaryDirectory() as folder:
            identity = Identity.ephemeral(Path(folder))
            async with open_swarm(identity, initial_peers=addresses, listen=False) as swarm:
                return {record.peer_id for record in await swarm.directory.fetch_all()}

    return asyncio.run(look())


def _assert_left(bed: Bed, leaver: Node, within_s: float) -> None:
    assert leaver.process.wait(within_s) == 0, leaver.log()
    assert not leaver.ready_path.exists()
    bed.forget_dead()
    assert peers_in_directory(bed.addresses) == {node.peer_id for node in bed.nodes}


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("routing", ROUTES)
def test_serving_node_leaves_while_a_replica_is_there(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hop: int
) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]])
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        leaver = holders(bed, session)[hop]
        blow = Blow(
            after=11,
            strike=lambda: leaver.process.send_signal(signal.SIGTERM),
            # Slow enough for the move to happen within the generation.
            pause_s=0.02,
        )
        run_with_blow(alone, model, session, random_ids(1, 20), blow, f"node leaves, {routing}")
        assert leaver.peer_id not in {hop.peer_id for hop in session.hops}
        _assert_left(bed, leaver, EXIT_S)


@pytest.mark.parametrize("routing", ROUTES)
def test_serving_node_leaves_once_a_replacement_has_joined(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    bed.start(thirds(BLOCKS))
    joining = threading.Timer(2.0, bed.start, [[MIDDLE]])
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        leaver = holders(bed, session)[1]

        def strike() -> None:
            leaver.process.send_signal(signal.SIGTERM)
            joining.start()

        blow = Blow(after=3, strike=strike, pause_s=0.25)
        run_with_blow(alone, model, session, random_ids(1, 20), blow, f"node leaves, {routing}")
        joining.join()
        assert leaver.peer_id not in {hop.peer_id for hop in session.hops}
        _assert_left(bed, leaver, EXIT_S)


@pytest.mark.parametrize("routing", ROUTES)
def test_drain_runs_out_before_a_replacement_joins(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    bed.start(thirds(BLOCKS), "--drain-timeout-s", "1")
    joining = threading.Timer(4.0, bed.start, [[MIDDLE]])
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        leaver = holders(bed, session)[1]

        def strike() -> None:
            leaver.process.send_signal(signal.SIGTERM)
            joining.start()

        blow = Blow(after=3, strike=strike, pause_s=0.1)
        run_with_blow(alone, model, session, random_ids(1, 20), blow, "drained, joins later")
        joining.join()
        _assert_left(bed, leaver, EXIT_S)


@pytest.mark.parametrize("routing", ROUTES)
def test_node_leaves_between_two_generations_of_a_session(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    bed.start([*thirds(BLOCKS), MIDDLE], "--drain-timeout-s", "1")
    ids_BL = random_ids(1, 20)
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        output_BL = generate(model, ids_BL, session, new_tokens=10)
        leaver = holders(bed, session)[1]
        leaver.process.send_signal(signal.SIGTERM)
        # An idle client hears of it, but moves with its next step only.
        _assert_left(bed, leaver, 1 + EXIT_S)
        again_BL = generate(model, output_BL, session, new_tokens=20)
        assert_undisturbed(alone, again_BL, output_BL, new_tokens=20)


@pytest.mark.parametrize("hop", [0, 2])
@pytest.mark.parametrize("routing", ROUTES)
def test_one_node_leaves_and_its_neighbour_dies(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hop: int
) -> None:
    """Nobody can stand in for the leaver; that must not hide the loss of the other."""
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]])
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        victim, leaver = holders(bed, session)[hop], holders(bed, session)[1]

        def strike() -> None:
            leaver.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            bed.kill(victim)
            # Both must be known by the next step.
            time.sleep(0.3)

        blow = Blow(after=5, strike=strike)
        run_with_blow(alone, model, session, random_ids(1, 20), blow, "leaves and dies")


@pytest.mark.parametrize("number", SIGNALS)
def test_idle_node_leaves_at_once(bed: Bed, number: signal.Signals) -> None:
    bed.start(thirds(BLOCKS))
    leaver = bed.nodes[1]
    leaver.process.send_signal(number)
    _assert_left(bed, leaver, EXIT_S)


def test_whole_swarm_leaves_at_once(bed: Bed) -> None:
    """Nobody is left to take the withdrawals; that must not take long either."""
    bed.start(thirds(BLOCKS))
    for node in bed.nodes:
        node.process.send_signal(signal.SIGTERM)
    for node in bed.nodes:
        assert node.process.wait(2 * EXIT_S) == 0


@pytest.mark.parametrize("routing", ROUTES)
def test_second_signal_ends_a_drain_the_hard_way(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    bed.start(thirds(BLOCKS))
    joining = threading.Timer(2.0, bed.start, [[MIDDLE]])
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        leaver = holders(bed, session)[1]
        p2pd = leaver.p2pd()

        def strike() -> None:
            leaver.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            leaver.process.send_signal(signal.SIGTERM)
            assert leaver.process.wait(2) == -signal.SIGTERM
            bed.forget_dead()
            joining.start()

        blow = Blow(after=11, strike=strike)
        run_with_blow(alone, model, session, random_ids(1, 20), blow, "drain cut short")
        joining.join()
        p2pd.wait(5)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", SIGNALS)
def test_node_is_stopped_while_it_starts(bed: Bed, number: signal.Signals) -> None:
    """At every stage: reading the model, joining, loading, measuring, the first moments."""
    bed.start(thirds(BLOCKS))
    for tenths in range(2, 24, 2):
        starting = bed.launch(MIDDLE)
        time.sleep(tenths / 10)
        # Before the daemon has taken charge of its signals, they end it as they end any process.
        early = set() if _catches_sigterm(starting.process.pid) else {-signal.SIGTERM, 130}
        starting.process.send_signal(number)
        code = starting.process.wait(15)
        log = starting.log_path.read_text(encoding="utf-8")
        assert code in {0, *early}, f"{code} after {tenths / 10} s: {log}"
        assert not early or tenths <= 14, "it should catch its signals by now"
        assert not starting.ready_path.exists()
    assert peers_in_directory(bed.addresses) == {node.peer_id for node in bed.nodes}


def _catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
