"""Nodes whose KV cache is in 8 bits, against transformers with such a cache of its own.

B rows, L columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import RefusedError, UnsupportedFeatureError
from nesa_node.core.ids import Span
from tests.audit_outcomes import audit_outcomes
from tests.client.local_models import left_padded, random_ids
from tests.e2e.joining import ROUTES, joined
from tests.engine.int8_cache import Int8DynamicCache
from tests.engine.tiny_models import BLOCKS, reference
from tests.same_tokens import INT8_CACHE_CLOSENESS, Ledger, assert_same_tokens
from tests.swarms import in_process_swarm, thirds

OPTIONS: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def alone(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = reference(folder)
    return model


@pytest.fixture(scope="module")
def addresses(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    swarm = tmp_path_factory.mktemp("swarm")
    with in_process_swarm(folder, thirds(BLOCKS), swarm, cache_dtype="int8") as addresses:
        yield addresses


@pytest.fixture(params=ROUTES)
def model(
    folder: Path, addresses: tuple[str, ...], request: pytest.FixtureRequest
) -> Iterator[DistributedModelForCausalLM]:
    with joined(folder, addresses, request.param) as model:
        yield model


def assert_as_with_8_bits(
    alone: PreTrainedModel, output_BL: Tensor, ids_BL: Tensor, **options: Any
) -> None:
    assert_same_tokens(
        alone,
        output_BL,
        ids_BL,
        **{**OPTIONS, **options},
        past_key_values=Int8DynamicCache(),
        closeness=INT8_CACHE_CLOSENESS,
        ledger=Ledger(),
    )


def test_tokens_are_those_of_transformers_with_such_a_cache(
    alone: PreTrainedModel, model: DistributedModelForCausalLM
) -> None:
    ids_BL, mask_BL = left_padded([90, 33])
    output: Any = model.generate(ids_BL, attention_mask=mask_BL, **OPTIONS)
    assert_as_with_8_bits(alone, output, ids_BL, attention_mask_BL=mask_BL)
    with pytest.raises(AssertionError):
        assert_same_tokens(alone, output, ids_BL, mask_BL, **OPTIONS, ledger=Ledger())


def test_beams_share_pages_in_8_bits(
    alone: PreTrainedModel, model: DistributedModelForCausalLM
) -> None:
    ids_BL = random_ids(1, 45, seed=3)
    options = {**OPTIONS, "max_new_tokens": 12, "num_beams": 3}
    # Given, or transformers would take the random zeros of a prompt for padding.
    mask_BL = torch.ones_like(ids_BL)
    output: Any = model.generate(ids_BL, attention_mask=mask_BL, **options)
    generate: Any = alone.generate
    expected = generate(
        ids_BL,
        attention_mask=mask_BL,
        past_key_values=Int8DynamicCache(),
        **options,
    )
    assert torch.equal(output, expected)


def test_a_prompt_that_is_cached_goes_on_with_its_codes(
    alone: PreTrainedModel, model: DistributedModelForCausalLM
) -> None:
    ids_BL = random_ids(1, 100, seed=5)
    for _ in range(2):
        output: Any = model.generate(ids_BL, attention_mask=torch.ones_like(ids_BL), **OPTIONS)
        assert_as_with_8_bits(alone, output, ids_BL)


def test_a_rollback_cuts_them(model: DistributedModelForCausalLM) -> None:
    ids_BL = random_ids(1, 80, seed=6)
    with model.inference_session(200) as session:
        session.step(ids_BL)
        expected = session.step(ids_BL[:, :3])
        session.rollback([50])
        session.step(ids_BL[:, 50:])
        found = session.step(ids_BL[:, :3])
    assert float((found - expected).abs().max() / expected.abs().max()) <= 2e-3


def test_audits_convict_no_node_for_its_cache(folder: Path, addresses: tuple[str, ...]) -> None:
    """They are computed again with such a cache, and reported; no bounds were fitted."""
    with joined(folder, addresses, "chain", audit=1.0) as model:
        model.generate(random_ids(1, 40), **OPTIONS)
    assert audit_outcomes(model) == {"uncalibrated": 3}


def test_nodes_in_8_bits_are_not_used_where_full_precision_is_asked_for(
    folder: Path, addresses: tuple[str, ...]
) -> None:
    with (
        pytest.raises(RefusedError, match="none with a cache in int8, and full was asked for"),
        joined(folder, addresses, "chain", min_precision="full"),
    ):
        pass
    with joined(folder, addresses, "chain", min_precision="int8"):
        pass


def test_a_vote_names_the_kind_for_which_it_has_no_bounds(folder: Path, tmp_path: Path) -> None:
    whole = [Span(0, BLOCKS)] * 3
    with (
        in_process_swarm(folder, whole, tmp_path, cache_dtype="int8") as addresses,
        pytest.raises(UnsupportedFeatureError, match=r"quantization none\+kv-int8"),
        joined(folder, addresses, "star", verify="2of3"),
    ):
        pass


def test_nodes_of_both_kinds_serve_one_chain(
    alone: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    ids_BL = random_ids(1, 60, seed=7)
    first, *others = thirds(BLOCKS)
    with in_process_swarm(folder, [first], tmp_path, cache_dtype="int8") as addresses:
        more = tmp_path / "more"
        more.mkdir()
        with (
            in_process_swarm(folder, others, more, initial_peers=addresses),
            joined(folder, addresses, "chain") as model,
            model.inference_session(100) as session,
        ):
            found_BLV = session.step(ids_BL)
    with torch.no_grad():
        plain: Any = alone(ids_BL)
        coarse: Any = alone(ids_BL, past_key_values=Int8DynamicCache(), use_cache=True)
    apart = float((coarse.logits - plain.logits).abs().max())
    assert 0 < float((found_BLV[0, -1] - plain.logits[0, -1]).abs().max()) <= apart
