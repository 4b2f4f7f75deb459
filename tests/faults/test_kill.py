"""`kill -9` of a node while it serves, with a replica alive: the tokens of an undisturbed run."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from nesa_node.core.settings.choices import RouteName
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS, NEW_TOKENS
from tests.faults.bed import Bed, open_bed
from tests.faults.nursery import Nursery
from tests.faults.runs import ROUTES, Blow, holders, join_bed, run_with_blow
from tests.swarms import thirds

pytestmark = pytest.mark.slow

SEEDS = range(20)
SPANS = thirds(BLOCKS) * 2
LONGEST_DELAY_S = 0.05
"""A few steps long."""


@pytest.fixture(scope="module")
def module_bed(
    nursery: Nursery, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bed]:
    with open_bed(nursery, tiny_llama, tmp_path_factory.mktemp("bed")) as bed:
        yield bed


@pytest.fixture
def bed(module_bed: Bed) -> Bed:
    """One bed for all tests here, in which every span has two nodes when a test begins."""
    module_bed.mend(SPANS)
    return module_bed


@pytest.fixture(autouse=True)
def _test_leaves_nothing(bed: Bed, _test_leaves_nothing: None) -> None:
    """As everywhere, but the nodes that mend the bed are started before the test counts."""


def _prompt(rng: random.Random) -> torch.Tensor:
    return random_ids(1, rng.randint(3, 60), seed=rng.getrandbits(30))


def _kill_at_random_token(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hop: int, rng: random.Random
) -> None:
    ids_BL = _prompt(rng)
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        victim = holders(bed, session)[hop]
        blow = Blow(
            after=rng.randint(1, NEW_TOKENS - 8),
            strike=lambda: bed.kill(victim),
            delay_s=rng.choice((0.0, rng.uniform(0, LONGEST_DELAY_S))),
        )
        run_with_blow(alone, model, session, ids_BL, blow, f"node killed, {routing}")
        assert victim.peer_id not in {hop.peer_id for hop in session.hops}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("routing", ROUTES)
def test_middle_node_killed_at_random_token(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, seed: int
) -> None:
    _kill_at_random_token(alone, bed, routing, 1, random.Random(seed))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("hop", [0, 2])
@pytest.mark.parametrize("routing", ROUTES)
def test_first_or_last_node_killed_at_random_token(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hop: int, seed: int
) -> None:
    _kill_at_random_token(alone, bed, routing, hop, random.Random(100 + seed))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("routing", ROUTES)
def test_node_killed_during_a_long_prefill(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, hop: int, seed: int
) -> None:
    rng = random.Random(200 + seed)
    ids_BL = random_ids(1, 700, seed=seed)
    with join_bed(bed, routing) as model, model.inference_session(800) as session:
        victim = holders(bed, session)[hop]
        # It is the prompt's arrival at the streamer that sets the clock; the prefill comes next.
        blow = Blow(after=0, strike=lambda: bed.kill(victim), delay_s=rng.uniform(0.005, 0.15))
        run_with_blow(alone, model, session, ids_BL, blow, f"node killed in prefill, {routing}")
        assert victim.peer_id not in {hop.peer_id for hop in session.hops}


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("routing", ROUTES)
def test_several_nodes_killed_at_once(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, pair: tuple[int, ...], seed: int
) -> None:
    rng = random.Random(300 + seed)
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        victims = [holders(bed, session)[hop] for hop in pair]
        blow = Blow(after=rng.randint(1, NEW_TOKENS - 8), strike=lambda: bed.kill(*victims))
        run_with_blow(
            alone, model, session, _prompt(rng), blow, f"{len(pair)} nodes killed, {routing}"
        )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("routing", ROUTES)
def test_second_node_killed_while_the_first_is_replaced(
    alone: PreTrainedModel, bed: Bed, routing: RouteName, seed: int
) -> None:
    rng = random.Random(400 + seed)
    with join_bed(bed, routing) as model, model.inference_session(128) as session:
        first, second = rng.sample(holders(bed, session), 2)
        pause_s = rng.uniform(0.0, 0.3)

        def strike() -> None:
            bed.kill(first)
            time.sleep(pause_s)
            bed.kill(second)

        # With a delay the blows fall beside the generation, which goes on meanwhile.
        blow = Blow(after=rng.randint(1, NEW_TOKENS // 2), strike=strike, delay_s=0.001)
        run_with_blow(alone, model, session, _prompt(rng), blow, f"one after another, {routing}")


@pytest.mark.parametrize("routing", ROUTES)
def test_client_that_lives_on_survives_kill_after_kill(
    alone: PreTrainedModel, bed: Bed, routing: RouteName
) -> None:
    """What a client remembers of bad peers must not keep it from the good ones."""
    rng = random.Random(500)
    with join_bed(bed, routing) as model:
        for hop in (0, 1, 2):
            with model.inference_session(128) as session:
                victim = holders(bed, session)[hop]
                blow = Blow(after=rng.randint(1, 40), strike=partial(bed.kill, victim))
                run_with_blow(alone, model, session, _prompt(rng), blow, f"same client, {routing}")
