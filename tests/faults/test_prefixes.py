"""Nodes that die or leave under sessions that began with what others had computed."""

from __future__ import annotations

import signal
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.client.session.session import RemoteSession
from nesa_node.core.settings.choices import RouteName
from tests.client.local_models import random_ids
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

FIRST, MIDDLE, LAST = SPANS = thirds(BLOCKS)
SHARED = 200
HELD = 192
NEW = 24
PAUSE_S = 0.03


def prompts(rows: int) -> Tensor:
    """Ids [B, L] with one beginning and ends of their own."""
    return torch.cat([random_ids(1, SHARED).expand(rows, -1), random_ids(rows, 20, seed=1)], 1)


def opened(model: DistributedModelForCausalLM, ids_BL: Tensor) -> InferenceSession:
    return model.inference_session(512, ids_BL.shape[0], prompt=ids_BL)


def start_of(session: InferenceSession) -> list[int]:
    """From where on the session's nodes keep what they sent."""
    return remote(session)._route.prefix_start.start_lengths


def remote(session: InferenceSession) -> RemoteSession:
    assert isinstance(session._blocks, RemoteSession)
    return session._blocks


def leave_behind(model: DistributedModelForCausalLM, ids_BL: Tensor) -> None:
    with opened(model, ids_BL) as session:
        session.step(ids_BL)


SLOW_HOPS = [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("hop", SLOW_HOPS)
@pytest.mark.parametrize("routing", ROUTES)
def test_all_go_back_to_what_the_replacement_holds(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hop: int
) -> None:
    """The first row began with 192 tokens that nobody can send the new node but the client."""
    bed.start(SPANS)
    ids_BL = torch.cat([prompts(2)[1:], random_ids(1, SHARED + 20, seed=2)])
    with join_bed(bed, routing) as model:
        leave_behind(model, prompts(1))
        with opened(model, ids_BL) as session:
            assert session.lengths == (HELD, 0)
            victim = holders(bed, session)[hop]
            bed.start([SPANS[hop]])
            blow = Blow(after=5, strike=lambda: bed.kill(victim))
            name = f"reused start, node killed, {routing}"
            run_with_blow(alone, model, session, ids_BL, blow, name, new_tokens=NEW)
            assert start_of(session) == [0, 0]
            assert remote(session).recoveries == 1
            assert session.tokens_sent == 2 * (SHARED + 20 + NEW - 1) - HELD
        with opened(model, ids_BL) as session:
            assert session.lengths == (HELD, HELD), "all nodes hold both rows now"


@pytest.mark.parametrize("routing", ROUTES)
def test_a_replacement_that_holds_the_prefix_sends_nobody_back(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    """Both sessions lose the node; what the first brings to its replacement the second finds."""
    bed.start(SPANS)
    one_BL, two_BL = prompts(2)[:1], prompts(2)[1:]
    with join_bed(bed, routing) as model:
        leave_behind(model, prompts(1))
        with opened(model, one_BL) as one, opened(model, two_BL) as two:
            for session, ids_BL in ((one, one_BL), (two, two_BL)):
                generate(model, ids_BL, session, new_tokens=4)
                assert start_of(session) == [HELD]
            victim = holders(bed, one)[1]
            bed.start([MIDDLE])
            bed.kill(victim)
            for session, ids_BL, start in ((one, one_BL, 0), (two, two_BL, HELD)):
                ours_BL = generate(model, ids_BL, session, new_tokens=NEW)
                assert_undisturbed(alone, ours_BL, ids_BL, new_tokens=NEW)
                assert start_of(session) == [start]
                assert remote(session).recoveries == 1


@pytest.mark.slow
@pytest.mark.parametrize("routing", ROUTES)
def test_one_node_after_another_is_lost_and_rows_are_rolled_back(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    bed.start(SPANS)
    ids_BL = prompts(2)
    with join_bed(bed, routing) as model:
        leave_behind(model, prompts(1))
        with opened(model, ids_BL) as session:
            for hop in (2, 0, 1, 2):
                victim = holders(bed, session)[hop]
                bed.start([SPANS[hop]])
                blow = Blow(after=3, strike=partial(bed.kill, victim))
                run_with_blow(
                    alone, model, session, ids_BL, blow, "reused start, again", new_tokens=NEW
                )
                session.rollback([100, session.lengths[1] - 3])


@pytest.mark.parametrize("hop", SLOW_HOPS)
def test_a_session_that_began_with_a_prefix_is_handed_over_whole(
    alone: PreTrainedModel, bed: Bed, hop: int
) -> None:
    bed.start(SPANS)
    ids_BL = prompts(2)[1:]
    with join_bed(bed, "chain") as model:
        leave_behind(model, prompts(1))
        with opened(model, ids_BL) as session:
            assert session.lengths == (HELD,)
            bed.start([SPANS[hop]])
            leaver = holders(bed, session)[hop]
            blow = Blow(
                after=5, strike=lambda: leaver.process.send_signal(signal.SIGTERM), pause_s=PAUSE_S
            )
            run_with_blow(alone, model, session, ids_BL, blow, "reused start, hand-over")
            assert session.hops[hop].peer_id != leaver.peer_id
            [(successor, held)] = remote(session)._route.held_tokens.items()
            assert successor.hop == session.hops[hop]
            assert held[0] > SHARED, "the cache came with it"
            assert start_of(session) == [HELD]
            assert remote(session).recoveries == 0
            assert leaver.process.wait(8) == 0
        with opened(model, ids_BL) as session:
            assert session.lengths == (HELD,), "the successor remembers it too"


@pytest.mark.slow
def test_what_the_donor_kept_is_sent_by_its_successor(alone: PreTrainedModel, bed: Bed) -> None:
    """The node after the successor is lost, and its replacement knows the prefix already."""
    bed.start(SPANS)
    one_BL, two_BL = prompts(2)[:1], prompts(2)[1:]
    with join_bed(bed, "chain") as model:
        leave_behind(model, prompts(1))
        with opened(model, one_BL) as one, opened(model, two_BL) as two:
            generate(model, one_BL, one, new_tokens=4)
            leaver, victim = holders(bed, two)[1:]
            bed.start([MIDDLE])
            leave = Blow(
                after=5, strike=lambda: leaver.process.send_signal(signal.SIGTERM), pause_s=PAUSE_S
            )
            run_with_blow(alone, model, two, two_BL, leave, "reused start, hand-over")
            generate(model, one_BL, one, new_tokens=8)
            assert start_of(two) == [HELD]
            bed.start([LAST])
            bed.kill(victim)
            for session, ids_BL in ((one, one_BL), (two, two_BL)):
                ours_BL = generate(model, ids_BL, session, new_tokens=NEW)
                assert_undisturbed(alone, ours_BL, ids_BL, new_tokens=NEW)
            assert start_of(two) == [HELD]


@pytest.mark.slow
@pytest.mark.parametrize("hop", [0, 1, 2])
def test_a_standby_goes_on_after_a_reused_start(alone: PreTrainedModel, bed: Bed, hop: int) -> None:
    bed.start([*SPANS, *SPANS])
    with join_bed(bed, "chain", replicate_cache=True) as model:
        for _ in range(3):
            leave_behind(model, prompts(1))
        with opened(model, prompts(2)[1:]) as session:
            victim = holders(bed, session)[hop]
            blow = Blow(after=30, strike=lambda: bed.kill(victim), pause_s=PAUSE_S)
            run_with_blow(alone, model, session, prompts(2)[1:], blow, "reused start, standby")
            assert session.hops[hop].peer_id != victim.peer_id
            assert remote(session).recoveries == 1


@pytest.mark.parametrize("routing", ROUTES)
def test_a_session_begins_where_the_most_forgetful_node_can(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    bed.start([FIRST, LAST])
    bed.start([MIDDLE], "--attn-cache-tokens", "640", "--max-cache-tokens-per-peer", "640")
    ids_BL = prompts(1)
    with join_bed(bed, routing) as model, join_bed(bed, routing) as other:
        with model.inference_session(300, prompt=ids_BL) as session:
            session.step(ids_BL)
        with other.inference_session(512) as session:
            session.step(random_ids(1, 500, seed=3))
        with model.inference_session(300, prompt=ids_BL) as session:
            (held,) = session.lengths
            assert 0 < held < HELD
            ours_BL = generate(model, ids_BL, session, new_tokens=NEW)
            assert session.tokens_sent == SHARED + 20 + NEW - 1 - held
        assert_undisturbed(alone, ours_BL, ids_BL, new_tokens=NEW)
