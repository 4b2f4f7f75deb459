"""Prompts that begin alike are computed once, as long as their nodes remember them.

B rows, L columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.choices import RouteName
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.messages import Message, Open
from nesa_node.swarm.protocol.stream import Stream
from tests.client.local_models import left_padded, random_ids
from tests.e2e.joining import ROUTES, both_routes, joined
from tests.engine.chained import distance
from tests.engine.tiny_models import BLOCKS
from tests.same_tokens import assert_same_tokens
from tests.swarms import in_process_swarm, thirds

OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
SHARED = 200
PAGE = 32
HELD = SHARED // PAGE * PAGE


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two clients that the nodes trust."""
    keys = tmp_path_factory.mktemp("identities")
    return [keys / "one.key", keys / "two.key"]


@pytest.fixture(scope="module")
def addresses(
    folder: Path, identities: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ...]]:
    swarm = tmp_path_factory.mktemp("swarm")
    trusted = tuple(Identity.load_or_create(path).peer_id for path in identities)
    with in_process_swarm(folder, thirds(BLOCKS), swarm, trusted_peers=trusted) as addresses:
        yield addresses


@pytest.fixture(params=ROUTES)
def model(
    folder: Path, addresses: tuple[str, ...], request: pytest.FixtureRequest
) -> Iterator[DistributedModelForCausalLM]:
    """A client of its own for each test, which nobody has left anything for."""
    with joined(folder, addresses, request.param) as model:
        yield model


def prompts(rows: int, *, seed: int) -> Tensor:
    """Ids [B, L] with one beginning and ends of their own."""
    shared_1L = random_ids(1, SHARED, seed=seed)
    return torch.cat([shared_1L.expand(rows, -1), random_ids(rows, 30, seed=seed + 1)], 1)


def opened(model: DistributedModelForCausalLM, ids_BL: Tensor) -> InferenceSession:
    return model.inference_session(300, ids_BL.shape[0], prompt=ids_BL)


def continued(model: DistributedModelForCausalLM, session: InferenceSession, ids: Tensor) -> Tensor:
    ids_BL: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), session=session, **OPTIONS
    )
    return ids_BL


def test_a_second_prompt_sends_only_what_differs(
    model: DistributedModelForCausalLM, alone: PreTrainedModel
) -> None:
    first_BL, second_BL = prompts(2, seed=1)[:, None]
    with opened(model, first_BL) as session:
        assert session.lengths == (0,)
        ours_BL = continued(model, session, first_BL)
    assert_same_tokens(alone, ours_BL, first_BL, **OPTIONS)
    for prompt_BL, held in ((second_BL, HELD), (first_BL, 224), (ours_BL, 224), (ours_BL, 224)):
        with opened(model, prompt_BL) as session:
            assert session.lengths == (held,)
            assert session.token_ids == (tuple(prompt_BL[0, :held].tolist()),)
            again_BL = continued(model, session, prompt_BL)
            assert session.tokens_sent == prompt_BL.shape[1] - held + 15
        assert_same_tokens(alone, again_BL, prompt_BL, **OPTIONS)


def test_generate_reuses_without_being_asked(
    model: DistributedModelForCausalLM, alone: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids_BL, mask_BL = left_padded([230, 211], seed=4)
    sent: list[InferenceSession] = []
    opening = model.inference_session

    def noted(*args: Any, **kwargs: Any) -> InferenceSession:
        sent.append(opening(*args, **kwargs))
        return sent[-1]

    monkeypatch.setattr(model, "inference_session", noted)
    for options in (OPTIONS, OPTIONS | {"num_beams": 2}):
        for _ in range(2):
            ours_BL = model.generate(ids_BL, attention_mask=mask_BL, **options)
            assert_same_tokens(alone, ours_BL, ids_BL, mask_BL, **options)
    tokens = [session.tokens_sent for session in sent]
    assert tokens[0] == 230 + 211 + 2 * 15
    assert tokens[1] == (230 - 224) + (211 - 192) + 2 * 15
    assert tokens[2] == tokens[3] < 2 * 2 * (6 + 19 + 15)


def test_rows_begin_where_each_can_and_can_be_rolled_back_into_that(
    model: DistributedModelForCausalLM, alone: PreTrainedModel
) -> None:
    one_BL, two_BL = prompts(1, seed=5), prompts(1, seed=7)
    with opened(model, one_BL) as session:
        continued(model, session, one_BL)
    both_BL = torch.cat([two_BL, one_BL])
    with opened(model, both_BL) as session:
        assert session.lengths == (0, 224)
        assert_same_tokens(alone, continued(model, session, both_BL), both_BL, **OPTIONS)
        session.rollback([50, 75])
        logits_BLV = session.step(random_ids(2, 6, seed=9))
    with opened(model, both_BL) as session:
        assert session.lengths == (224, 224)
        assert_same_tokens(alone, continued(model, session, both_BL), both_BL, **OPTIONS)
    for row, length in enumerate((50, 75)):
        ids_L = torch.cat([both_BL[row, :length], random_ids(2, 6, seed=9)[row]])
        with torch.no_grad():
            forward: Any = alone.__call__
            expected_LV = forward(ids_L[None]).logits[0, length:]
        assert distance(logits_BLV[row], expected_LV) <= 1e-4


def test_a_turn_that_continues_an_answer_finds_the_answer_too(
    model: DistributedModelForCausalLM, alone: PreTrainedModel
) -> None:
    prompt_BL = random_ids(1, 60, seed=11)
    with opened(model, prompt_BL) as session:
        answer_BL = continued(model, session, prompt_BL)
        more_BL = torch.cat([answer_BL, random_ids(1, 40, seed=12)], 1)
        answer_BL = continued(model, session, more_BL)
    next_BL = torch.cat([answer_BL, random_ids(1, 9, seed=13)], 1)
    with opened(model, next_BL) as session:
        assert session.lengths == ((answer_BL.shape[1] - 1) // PAGE * PAGE,)
        assert_same_tokens(alone, continued(model, session, next_BL), next_BL, **OPTIONS)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("client_blocks", "held"), [((2, 0), 224), ((1, 1), 0)])
def test_a_client_that_runs_the_first_blocks_itself_reuses_too(
    folder: Path,
    addresses: tuple[str, ...],
    alone: PreTrainedModel,
    route: RouteName,
    client_blocks: tuple[int, int],
    held: int,
) -> None:
    prompt_BL = prompts(1, seed=15)
    with joined(folder, addresses, route, client_blocks=client_blocks) as model:
        for expected in (0, held):
            with opened(model, prompt_BL) as session:
                assert session.lengths == (expected,)
                ours_BL = continued(model, session, prompt_BL)
                assert_same_tokens(alone, ours_BL, prompt_BL, **OPTIONS)


def test_only_the_same_or_trusted_clients_with_the_same_salt_share(
    folder: Path, addresses: tuple[str, ...], identities: list[Path], alone: PreTrainedModel
) -> None:
    prompt_BL = prompts(1, seed=17)
    salt = b"a salt of several clients"

    def held(**options: Any) -> int:
        with joined(folder, addresses, "chain", **options) as model:
            with opened(model, prompt_BL) as session:
                (length,) = session.lengths
                ours_BL = continued(model, session, prompt_BL)
            assert_same_tokens(alone, ours_BL, prompt_BL, **OPTIONS)
        return length

    one, two = identities
    assert held(prefix_salt=salt) == 0
    assert held(prefix_salt=salt) == 0, "another peer id"
    assert held(prefix_salt=salt, identity_path=one) == 0
    assert held(prefix_salt=b"another salt, as long", identity_path=two) == 0
    assert held(prefix_salt=salt, identity_path=two, reuse_prefix=True) == 224
    assert held(identity_path=one) == 0
    assert held(identity_path=one, reuse_prefix=False) == 0


def test_a_salt_that_is_no_salt_is_refused(folder: Path) -> None:
    for options in ({"prefix_salt": b"short"}, {"prefix_salt": bytes(32), "reuse_prefix": False}):
        with (
            pytest.raises(ConfigError, match="prefix_salt"),
            joined(folder, (), "chain", **options),
        ):
            pass


def test_drafts_are_checked_after_a_reused_start(
    folder: Path, addresses: tuple[str, ...], alone: PreTrainedModel
) -> None:
    ids_BL = random_ids(1, 12, seed=19).repeat(1, 6)
    with both_routes(folder, addresses) as models:
        for model in models.values():
            for held in (0, 64):
                with opened(model, ids_BL) as session:
                    assert session.lengths == (held,)
                    ours_BL = model.generate(
                        ids_BL, session=session, prompt_lookup_num_tokens=4, **OPTIONS
                    )
                assert_same_tokens(alone, ours_BL, ids_BL, **OPTIONS)


def test_nodes_of_a_star_cannot_tell_that_they_serve_one_session(
    model: DistributedModelForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by its id, its secret or its prompt's digests; a chain's nodes know each other."""
    sent: list[Open] = []
    send = Stream.send

    async def spied(stream: Stream, message: Message, payload: Any = b"") -> None:
        if isinstance(message, Open):
            sent.append(message)
        await send(stream, message, payload)

    monkeypatch.setattr(Stream, "send", spied)
    with opened(model, prompts(1, seed=20)):
        pass
    names = [{message.session for message in sent}, {message.secret for message in sent}]
    assert len(sent) == 3
    if sent[0].mode == "chain":
        assert list(map(len, names)) == [1, 1]
        return
    assert list(map(len, names)) == [3, 3]
    digests = [digest for message in sent for row in message.prefix for digest in row]
    assert len(digests) == len(set(digests)) > 3
