"""What a client meets at nodes that will not, or cannot now, serve it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import BusyError, RefusedError
from nesa_node.core.settings.choices import RouteName
from nesa_node.engine.cache.pages import PAGE_TOKENS
from nesa_node.swarm.p2p.identity import Identity
from tests.client.local_models import random_ids
from tests.e2e.joining import ROUTES
from tests.engine.tiny_models import BLOCKS
from tests.swarms import in_process_swarm, thirds

SESSIONS_PER_PEER = 2
TOKENS_PER_PEER = 10 * PAGE_TOKENS

Join = Callable[..., AbstractContextManager[DistributedModelForCausalLM]]


@pytest.fixture(scope="module")
def denied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key file of a client that no node serves."""
    return tmp_path_factory.mktemp("identity") / "denied.key"


@pytest.fixture(scope="module")
def join(
    tiny: Callable[[str], Path], denied: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Join]:
    folder = tiny("llama")

    def join(**options: Any) -> AbstractContextManager[DistributedModelForCausalLM]:
        return AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, **{"queue_timeout_s": 0.5, **options}
        )

    with in_process_swarm(
        folder,
        thirds(BLOCKS),
        tmp_path_factory.mktemp("swarm"),
        max_sessions_per_peer=SESSIONS_PER_PEER,
        max_cache_tokens_per_peer=TOKENS_PER_PEER,
        deny_peers=(Identity.load_or_create(denied).peer_id,),
    ) as addresses:
        yield join


@pytest.mark.parametrize("route", ROUTES)
def test_one_session_beyond_the_quota_is_busy_and_others_are_not_hurt(
    join: Join, route: RouteName
) -> None:
    with join(routing=route) as model, join(routing=route) as other:
        first, second = model.inference_session(20), model.inference_session(20)
        with pytest.raises(BusyError, match=f"{SESSIONS_PER_PEER} sessions"):
            model.inference_session(20)
        with other.inference_session(20) as session:
            assert session.step(random_ids(1, 4)).isfinite().all()
        first.close()
        with model.inference_session(20) as third:
            assert third.step(random_ids(1, 4)).isfinite().all()
        assert second.step(random_ids(1, 4)).isfinite().all()
        second.close()


def test_tokens_beyond_the_quota_are_busy(join: Join) -> None:
    with join() as model:
        with model.inference_session(TOKENS_PER_PEER - PAGE_TOKENS):
            with pytest.raises(BusyError, match=f"no room for {2 * PAGE_TOKENS} more tokens"):
                model.inference_session(PAGE_TOKENS + 1)
            with model.inference_session(PAGE_TOKENS):
                pass
        with model.inference_session(TOKENS_PER_PEER):
            pass


def test_a_session_larger_than_any_quota_is_told_the_quota(join: Join) -> None:
    with (
        join() as model,
        pytest.raises(RefusedError, match=f"at most {TOKENS_PER_PEER}") as caught,
    ):
        model.inference_session(TOKENS_PER_PEER + 1)
    assert caught.value.code == "too_large"


def test_who_waits_gets_the_room_that_another_session_leaves(join: Join) -> None:
    with join(queue_timeout_s=20) as model:
        held = [model.inference_session(20) for _ in range(SESSIONS_PER_PEER)]
        leaving = threading.Timer(1.0, held[0].close)
        leaving.start()
        with model.inference_session(20) as session:
            assert session.step(random_ids(1, 4)).isfinite().all()
        leaving.join()
        held[1].close()


@pytest.mark.parametrize("route", ROUTES)
def test_a_denied_peer_is_told_so(join: Join, denied: Path, route: RouteName) -> None:
    with (
        join(identity_path=denied, routing=route) as model,
        pytest.raises(RefusedError, match="does not serve") as caught,
    ):
        model.inference_session(20)
    assert caught.value.code == "not_allowed"
