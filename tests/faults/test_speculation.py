"""`kill -9` of a node inside a step of drafted tokens: the tokens of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.client.local_models import random_ids
from tests.client.speculation.scripted_drafter import accepted_and_drafted, scripted_drafting
from tests.engine.tiny_models import BLOCKS, NEW_TOKENS
from tests.faults.bed import Bed, open_bed
from tests.faults.nursery import Nursery
from tests.faults.runs import ROUTES, Blow, holders, join_bed, run_with_blow
from tests.swarms import thirds

pytestmark = pytest.mark.slow

SPANS = thirds(BLOCKS) * 2
LONGEST_DELAY_S = 0.03
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


@pytest.mark.parametrize("seed", range(30))
def test_node_killed_inside_a_step_of_drafts(alone: PreTrainedModel, bed: Bed, seed: int) -> None:
    rng = random.Random(seed)
    routing, hop = ROUTES[seed % 2], rng.randrange(3)
    ids_BL = random_ids(1, rng.randint(3, 60), seed=rng.getrandbits(30))
    expected = alone.generate(  # type: ignore[operator]
        ids_BL, attention_mask=ids_BL * 0 + 1, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    # A star's nodes hand nothing over to a standby.
    with (
        join_bed(bed, routing, replicate_cache=routing == "chain" and seed % 3 == 0) as model,
        model.inference_session(128) as session,
    ):
        drafting = model.drafting = scripted_drafting(expected.tolist(), rng.choice((0, 3, 5)))
        victim = holders(bed, session)[hop]
        blow = Blow(
            after=rng.randint(4, NEW_TOKENS - 16),
            strike=lambda: bed.kill(victim),
            delay_s=rng.uniform(0, LONGEST_DELAY_S),
        )
        name = f"node killed in a step of drafts, {routing}"
        run_with_blow(alone, model, session, ids_BL, blow, name)
        assert victim.peer_id not in {hop.peer_id for hop in session.hops}
        assert accepted_and_drafted(drafting)[0] > 0
