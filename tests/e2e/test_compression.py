"""Hidden states compressed between real nodes, against a model that rounds them at the same places.

B rows, L columns, T packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nesa_node.compression import tensors
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.choices import RouteName
from tests.client.local_models import left_padded, random_ids
from tests.e2e.joining import ROUTES, joined
from tests.engine.chained import distance
from tests.engine.tiny_models import BLOCKS, reference
from tests.same_tokens import assert_same_tokens
from tests.swarms import in_process_swarm, thirds

STREAMS: dict[RouteName, int] = {"chain": 4, "star": 6}
LOSSY = ("bfloat16", "int8@2:16:8", "blockwise8@2:64:8", "int4@2:32:48")


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def alone(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = reference(folder)
    return model


@pytest.fixture(scope="module")
def addresses(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    with in_process_swarm(folder, thirds(BLOCKS), tmp_path_factory.mktemp("swarm")) as addresses:
        yield addresses


def rounded_logits(alone: PreTrainedModel, ids_BL: Tensor, codec: str) -> Tensor:
    """Logits [B, L, V] of a model whose hidden states are rounded where three nodes would."""

    def through(hidden: Tensor) -> Tensor:
        flat_TD = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        meta, payload = tensors.encode(flat_TD, codec=codec)
        return tensors.decode(meta, bytes(payload), max_bytes=flat_TD.nbytes).view_as(hidden)

    def before(_: Any, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return (through(args[0]), *args[1:])

    layers: Any = alone.model.layers
    hooks = [layers[span.start].register_forward_pre_hook(before) for span in thirds(BLOCKS)]
    hooks.append(alone.model.norm.register_forward_pre_hook(before))
    try:
        with torch.inference_mode():
            logits_BLV: Tensor = alone(ids_BL).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits_BLV


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("codec", LOSSY)
def test_named_codec_rounds_at_every_boundary_and_nowhere_else(
    alone: PreTrainedModel, folder: Path, addresses: tuple[str, ...], codec: str, route: RouteName
) -> None:
    ids_BL = random_ids(1, 40, seed=1)
    with (
        joined(folder, addresses, route, quality=codec) as model,
        model.inference_session(64) as session,
    ):
        ours_TV = session.ends.head(session.feed([ids_BL[0]]))
        assert session.codecs == (codec,) * STREAMS[route]
    exact_TV = alone(ids_BL).logits[0].detach()
    rounded_TV = rounded_logits(alone, ids_BL, codec)[0]
    lost = distance(exact_TV, rounded_TV)
    assert lost > 1e-3  # or this test could not fail
    assert distance(ours_TV, rounded_TV) < lost / 2


@pytest.mark.parametrize("route", ROUTES)
def test_lossless_tokens_are_those_of_the_model(
    alone: PreTrainedModel, folder: Path, addresses: tuple[str, ...], route: RouteName
) -> None:
    ids_BL, mask_BL = left_padded([40, 21, 33], seed=2)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    with joined(folder, addresses, route, quality="lossless") as model:
        ours_BL = model.generate(ids_BL, attention_mask=mask_BL, **options)
    assert_same_tokens(alone, ours_BL, ids_BL, mask_BL, **options)


@pytest.mark.parametrize("quality", ["high", "balanced"])
def test_nothing_is_compressed_on_loopback(
    alone: PreTrainedModel, folder: Path, addresses: tuple[str, ...], quality: str
) -> None:
    ids_BL = random_ids(1, 400, seed=3)
    with (
        joined(folder, addresses, "chain", quality=quality) as model,
        model.inference_session(500) as session,
    ):
        for start in range(0, 400, 100):
            hidden_TD = session.feed([ids_BL[0, start : start + 100]])
        assert session.codecs == ("none",) * 4
        ours_TV = session.ends.head(hidden_TD)
    assert distance(ours_TV, alone(ids_BL).logits[0, -100:].detach()) < 1e-4


def test_exact_session_does_not_begin_with_what_a_lossy_one_left(
    alone: PreTrainedModel, folder: Path, addresses: tuple[str, ...], tmp_path: Path
) -> None:
    ids_BL = random_ids(1, 200, seed=4)
    shared: dict[str, Any] = {
        "prefix_salt": b"one salt for both of us",
        "identity_path": tmp_path / "client.key",
    }
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for quality, held in (("int4@2:32:48", 0), ("int4@2:32:48", 192), ("exact", 0), ("exact", 192)):
        with (
            joined(folder, addresses, "chain", quality=quality, **shared) as model,
            model.inference_session(256, prompt=ids_BL) as session,
        ):
            assert session.lengths == (held,), quality
            ours_BL = model.generate(ids_BL, session=session, **options)
    assert_same_tokens(alone, ours_BL, ids_BL, **options)


def test_unknown_quality_is_a_config_error(folder: Path) -> None:
    with (
        pytest.raises(ConfigError, match="unknown quality 'best'"),
        joined(folder, (), "chain", quality="best"),
    ):
        pass
