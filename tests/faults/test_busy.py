"""Nodes without room: what was reserved elsewhere is released, and clients come again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest
from torch import Tensor
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import BusyError
from nesa_node.core.settings.choices import RouteName
from nesa_node.engine.cache.pages import PAGE_TOKENS
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS
from tests.faults.bed import Bed, Node
from tests.faults.runs import ROUTES, assert_undisturbed, generate, join_bed
from tests.swarms import thirds

pytestmark = pytest.mark.slow

SESSION = 3 * PAGE_TOKENS
ONE = ("--attn-cache-tokens", str(SESSION))
TWO = ("--attn-cache-tokens", str(2 * SESSION))


def _start_with_a_narrow_middle(bed: Bed) -> None:
    """The middle has room for one session, the others for two."""
    first, middle, last = thirds(BLOCKS)
    bed.start([first], *TWO)
    bed.start([middle], *ONE)
    bed.start([last], *TWO)


def _hold_one_session(*nodes: Node) -> bool:
    logs = [node.log() for node in nodes]
    return all(log.count("session_opened") == 1 + log.count("session_closed") for log in logs)


@pytest.mark.parametrize("routing", ROUTES)
def test_refused_open_releases_the_other_hops(bed: Bed, routing: RouteName) -> None:
    _start_with_a_narrow_middle(bed)
    first, middle, last = bed.nodes
    with (
        join_bed(bed, routing) as patient,
        join_bed(bed, routing, queue_timeout_s=2.0) as hasty,
    ):
        with patient.inference_session(SESSION):
            with pytest.raises(BusyError):
                hasty.inference_session(SESSION)
            deadline = time.monotonic() + 1.0
            while not _hold_one_session(first, last):
                assert time.monotonic() < deadline, "something of the attempts was kept"
                time.sleep(0.02)
            bed.start([middle.span], *ONE)
            with hasty.inference_session(SESSION) as second:
                assert [hop.peer_id for hop in second.hops] == [
                    first.peer_id,
                    bed.nodes[-1].peer_id,
                    last.peer_id,
                ]
        with hasty.inference_session(SESSION), patient.inference_session(SESSION):
            pass


@pytest.mark.parametrize("routing", ROUTES)
def test_room_is_back_as_soon_as_a_session_is_closed(bed: Bed, routing: RouteName) -> None:
    bed.start(thirds(BLOCKS), *ONE)
    with join_bed(bed, routing, queue_timeout_s=0.0) as model:
        for number in range(30):
            with model.inference_session(SESSION) as session:
                session.step(random_ids(1, 1 + number))


@pytest.mark.parametrize("routing", ROUTES)
def test_client_comes_again_until_there_is_room(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    _start_with_a_narrow_middle(bed)
    with join_bed(bed, routing) as first, join_bed(bed, routing) as second, ExitStack() as held:
        session = held.enter_context(first.inference_session(SESSION))
        leaving = threading.Timer(4.0, session.close)
        leaving.start()
        started = time.monotonic()
        with second.inference_session(SESSION) as late:
            assert 3.9 < time.monotonic() - started < 4.0 + 5.0
            output_BL = generate(second, random_ids(1, 20), late)
        assert_undisturbed(alone, output_BL, random_ids(1, 20))
        leaving.join()


@pytest.mark.parametrize("routing", ROUTES)
def test_clients_race_for_room_and_all_finish(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    """Every node has room for one session: no two clients may hold each other's half for good."""
    bed.start(thirds(BLOCKS), *ONE)
    rounds, clients = 4, 3

    def work(model: DistributedModelForCausalLM, number: int) -> None:
        for turn in range(rounds):
            ids_BL = random_ids(1, 10, seed=10 * number + turn)
            with model.inference_session(SESSION) as session:
                outputs.append((ids_BL, generate(model, ids_BL, session, new_tokens=8)))

    outputs: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as stack, ThreadPoolExecutor(clients) as pool:
        models = [stack.enter_context(join_bed(bed, routing)) for _ in range(clients)]
        for done in [pool.submit(work, model, n) for n, model in enumerate(models)]:
            done.result()
    assert len(outputs) == rounds * clients
    for ids_BL, output_BL in outputs:
        assert_undisturbed(alone, output_BL, ids_BL, new_tokens=8)


@pytest.mark.parametrize("routing", ROUTES)
def test_quota_of_sessions_is_shared_by_what_a_client_opens(bed: Bed, routing: RouteName) -> None:
    bed.start(thirds(BLOCKS), "--max-sessions-per-peer", "1")
    with (
        join_bed(bed, routing, queue_timeout_s=1.0) as model,
        join_bed(bed, routing, queue_timeout_s=1.0) as other,
    ):
        with model.inference_session(SESSION):
            with pytest.raises(BusyError):
                model.inference_session(SESSION)
            with other.inference_session(SESSION):
                pass
        with model.inference_session(SESSION):
            pass


@pytest.mark.parametrize("routing", ROUTES)
def test_killed_client_leaves_no_reservation(bed: Bed, routing: RouteName) -> None:
    """Here its libp2p daemon is killed, which is all that the nodes see of a client's death."""
    bed.start(thirds(BLOCKS), *ONE)
    with join_bed(bed, routing, queue_timeout_s=1.0) as dying, join_bed(bed, routing) as next_:
        session = dying.inference_session(SESSION)
        (p2pd,) = [p for p in psutil.Process().children() if p.name() == "p2pd"]
        p2pd.kill()
        with next_.inference_session(SESSION):
            pass
        session.close()
