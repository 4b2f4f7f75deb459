"""Nodes with KV caches in 8 bits that are killed, leave, and stand by.

B rows, L columns, V vocabulary.
"""

from __future__ import annotations

import signal

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.inference_session import InferenceSession
from tests.client.local_models import random_ids
from tests.engine.int8_cache import Int8DynamicCache
from tests.engine.tiny_models import BLOCKS, NEW_TOKENS
from tests.faults.bed import Bed
from tests.faults.runs import Blow, generate, holders, join_bed
from tests.faults.test_hand_over import PAUSE_S, PROMPT_TOKENS, _remote
from tests.same_tokens import INT8_CACHE_CLOSENESS, Ledger, assert_same_tokens
from tests.swarms import thirds

INT8 = ("--cache-dtype", "int8")
CLOSE = 0.05
"""Of the largest logit: by how much a token may be worse than the best one, where what was cached
in 8 bits goes on in full precision, or the other way round."""


def _run(
    alone: PreTrainedModel,
    model: DistributedModelForCausalLM,
    session: InferenceSession,
    blow: Blow,
) -> None:
    """All tokens are those of transformers with such a cache."""
    ids_BL = random_ids(1, PROMPT_TOKENS)
    output_BL = generate(model, ids_BL, session, streamer=blow)
    blow.check()
    assert_same_tokens(
        alone,
        output_BL,
        ids_BL,
        past_key_values=Int8DynamicCache(),
        closeness=INT8_CACHE_CLOSENESS,
        ledger=Ledger(),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )


@pytest.mark.parametrize("hop", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_replay_after_a_kill_gives_the_same_tokens(
    alone: PreTrainedModel, bed: Bed, hop: int
) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[hop]], *INT8)
    with join_bed(bed, "chain") as model, model.inference_session(512) as session:
        victim = holders(bed, session)[hop]
        blow = Blow(after=20, strike=lambda: victim.process.send_signal(signal.SIGKILL))
        _run(alone, model, session, blow)
        assert session.hops[hop].peer_id != victim.peer_id


def test_successor_goes_on_with_codes(alone: PreTrainedModel, bed: Bed) -> None:
    bed.start([*thirds(BLOCKS), thirds(BLOCKS)[1]], *INT8)
    with join_bed(bed, "chain") as model, model.inference_session(512) as session:
        leaver = holders(bed, session)[1]
        blow = Blow(
            after=5, strike=lambda: leaver.process.send_signal(signal.SIGTERM), pause_s=PAUSE_S
        )
        _run(alone, model, session, blow)
        [(successor, held)] = _remote(session)._route.held_tokens.items()
        assert successor.hop == session.hops[1]
        assert successor.hop.peer_id != leaver.peer_id
        assert held[0] > PROMPT_TOKENS, "the cache came with it"
        assert "session_handed_over" in leaver.log()


@pytest.mark.slow
def test_standby_goes_on_where_a_node_dies(alone: PreTrainedModel, bed: Bed) -> None:
    bed.start([*thirds(BLOCKS), *thirds(BLOCKS)], *INT8)
    with (
        join_bed(bed, "chain", replicate_cache=True) as model,
        model.inference_session(512) as session,
    ):
        victim = holders(bed, session)[1]
        blow = Blow(
            after=30,
            strike=lambda: victim.process.send_signal(signal.SIGKILL),
            pause_s=PAUSE_S,
        )
        _run(alone, model, session, blow)
        remote = _remote(session)
        [(successor, held)] = remote._route.held_tokens.items()
        assert successor.hop == session.hops[1]
        assert held[0] > PROMPT_TOKENS, "the standby had the prompt"
        assert remote.recoveries == 1


def _worst_choice(alone: PreTrainedModel, output_1L: Tensor) -> float:
    """By how much a token is worse than the best one, of the largest logit."""
    with torch.no_grad():
        logits_LV = alone(output_1L).logits[0, PROMPT_TOKENS - 1 : -1]
    chosen_L = logits_LV.gather(1, output_1L[0, PROMPT_TOKENS:, None])[:, 0]
    return float(((logits_LV.amax(1) - chosen_L) / logits_LV.abs().amax(1)).max())


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [((), INT8), (INT8, ())])
def test_sessions_go_over_between_nodes_of_both_kinds(
    alone: PreTrainedModel, bed: Bed, kinds: tuple[tuple[str, ...], ...]
) -> None:
    giving, taking = kinds
    first, middle, last = thirds(BLOCKS)
    bed.start([first, last])
    [leaver] = bed.start([middle], *giving)
    with join_bed(bed, "chain") as model, model.inference_session(512) as session:
        assert session.hops[1].peer_id == leaver.peer_id
        [taker] = bed.start([middle], *taking)
        blow = Blow(
            after=5, strike=lambda: leaver.process.send_signal(signal.SIGTERM), pause_s=PAUSE_S
        )
        output_BL = generate(model, random_ids(1, PROMPT_TOKENS), session, streamer=blow)
        blow.check()
        assert session.hops[1].peer_id == taker.peer_id
        held = _remote(session)._route.held_tokens.values()
        came = any(lengths[0] > PROMPT_TOKENS for lengths in held)
        assert came == (taking == INT8), "what a cache in 8 bits holds is computed again"
    assert _worst_choice(alone, output_BL) <= CLOSE
