"""A node that leaves hands its sessions over: nothing is computed again."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from transformers import PreTrainedModel

from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.client.session.hop import HopLink
from nesa_node.client.session.session import RemoteSession
from nesa_node.core.ids import Span
from tests.client.local_models import random_ids
from tests.engine.chained import distance
from tests.engine.tiny_models import BLOCKS
from tests.faults.bed import Bed, Node
from tests.faults.runs import Blow, holders, join_bed, run_with_blow
from tests.swarms import thirds

PROMPT_TOKENS = 300
PAUSE_S = 0.03
"""After every token, so that the session goes on for longer than the hand-over."""


def _remote(session: InferenceSession) -> RemoteSession:
    assert isinstance(session._blocks, RemoteSession)
    return session._blocks


async def _bulk_handed_over(remote: RemoteSession, link: HopLink) -> None:
    route = remote._route
    assert route.prepare_successor(link)
    await route.successors._preparing[link]
    assert not route.prepare_successor(link)
    assert route.successors.link_of(link) is not None


def _leave(node: Node) -> None:
    node.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("hop", [pytest.param(0, marks=pytest.mark.slow), 1,
                                 pytest.param(2, marks=pytest.mark.slow)])  # fmt: skip
def test_successor_goes_on_with_what_it_was_handed(
    alone: PreTrainedModel, bed: Bed, hop: int
) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]])
    with join_bed(bed, "chain") as model, model.inference_session(512) as session:
        leaver = holders(bed, session)[hop]
        blow = Blow(after=5, strike=lambda: _leave(leaver), pause_s=PAUSE_S)
        prompt_BL = random_ids(1, PROMPT_TOKENS)
        run_with_blow(alone, model, session, prompt_BL, blow, "node hands over")
        moved = session.hops[hop]
        assert moved.peer_id != leaver.peer_id
        [(successor, held)] = _remote(session)._route.held_tokens.items()
        assert successor.hop == moved
        assert held[0] > PROMPT_TOKENS, "the cache came with it"
        assert "session_handed_over" in leaver.log()
        assert leaver.process.wait(8) == 0


@pytest.mark.parametrize("hop", [pytest.param(0, marks=pytest.mark.slow), 1,
                                 pytest.param(2, marks=pytest.mark.slow)])  # fmt: skip
def test_standby_goes_on_where_a_node_dies(alone: PreTrainedModel, bed: Bed, hop: int) -> None:
    bed.start([*thirds(BLOCKS), *thirds(BLOCKS)])
    with (
        join_bed(bed, "chain", replicate_cache=True) as model,
        model.inference_session(512) as session,
    ):
        victim = holders(bed, session)[hop]
        blow = Blow(
            after=30,
            strike=lambda: victim.process.send_signal(signal.SIGKILL),
            pause_s=PAUSE_S,
        )
        prompt_BL = random_ids(1, PROMPT_TOKENS)
        run_with_blow(alone, model, session, prompt_BL, blow, "warm standby")
        assert session.hops[hop].peer_id != victim.peer_id
        remote = _remote(session)
        [(successor, held)] = remote._route.held_tokens.items()
        assert successor.hop == session.hops[hop]
        assert held[0] > PROMPT_TOKENS, "the standby had the prompt"
        assert remote.recoveries == 1


@pytest.mark.slow
def test_rows_that_were_rolled_back_are_handed_over_as_they_are(
    alone: PreTrainedModel, bed: Bed
) -> None:
    """The first row is cut after the bulk has gone over, and fed other tokens."""
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[1]])
    prompt_BL, other_BL = random_ids(2, 150), random_ids(2, 60, seed=7)
    with join_bed(bed, "chain") as model, model.inference_session(512, 2) as session:
        leaver = holders(bed, session)[1]
        session.step(prompt_BL)
        remote = _remote(session)
        link = remote._route.links[1]
        model._loop.run(_bulk_handed_over(remote, link))
        session.rollback([100, 150])
        session.step(other_BL)
        _leave(leaver)
        deadline = time.monotonic() + 20
        logits_BV = session.step(other_BL[:, :1])[:, -1]
        while remote._route.links[1] is link and time.monotonic() < deadline:
            time.sleep(0.05)
            session.rollback([length - 1 for length in session.lengths])
            logits_BV = session.step(other_BL[:, :1])[:, -1]
        assert remote._route.links[1] is not link
    for row, kept in enumerate((100, 150)):
        ids_L = torch.cat([prompt_BL[row, :kept], other_BL[row], other_BL[row, :1]])
        with torch.no_grad():
            expected_V = alone(ids_L[None]).logits[0, -1]
        assert distance(logits_BV[row], expected_V) <= 1e-4


@pytest.mark.slow
def test_successor_that_dies_midway_leaves_the_session_where_it_is(
    alone: PreTrainedModel, bed: Bed
) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[1]])
    with join_bed(bed, "chain") as model, model.inference_session(512) as session:
        leaver = holders(bed, session)[1]
        [other] = [n for n in bed.nodes if n.span == Span(2, 4) and n is not leaver]

        def strike() -> None:
            _leave(leaver)
            other.process.send_signal(signal.SIGKILL)

        blow = Blow(after=5, strike=strike, pause_s=PAUSE_S)
        run_with_blow(alone, model, session, random_ids(1, PROMPT_TOKENS), blow, "successor dies")
        assert session.hops[1].peer_id == leaver.peer_id
