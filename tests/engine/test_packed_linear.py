"""T tokens, I inputs, O outputs."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nesa_node.core.span import Span
from nesa_node.engine import packed_linear
from nesa_node.engine.blocks import Blocks
from nesa_node.engine.measure import measure_throughput
from nesa_node.engine.packed_linear import PackedLinear, PackingByLoad, pack_linear_layers
from nesa_node.engine.parts import load_blocks
from tests.engine.chained import Chain, Run, distance, forward, new_row, open_local
from tests.engine.own_process import figures
from tests.engine.packing import MANY, ONE, decode, packed_layers
from tests.engine.tiny_models import NEW_TOKENS, greedy, prompt_ids, reference, save_tiny_model

WITHIN = 1e-5
LENGTHS = (1, 2, 3, 4, 7, 8, 16, 33, 64)
TO_PACK, TO_UNPACK = 16, 160
"""So many forwards of eight tokens, and of one, until layers change."""
LAYERS = 4
"""Linear layers of a fused block."""

SHAPES = ((33, 17), (1, 1), (5, 64), (64, 48))


def linears(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers of odd sizes, with a bias and without, torch's and GPT-2's."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for outputs, inputs in SHAPES:
        # transformers states no types for it.
        conv: Any = Conv1D(outputs, inputs)  # type: ignore[no-untyped-call]
        nn.init.normal_(conv.bias)
        made += [nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False), conv]
    return nn.Sequential(*made).to(dtype).requires_grad_(False)


def weight_OI(layer: Any) -> Tensor:
    weight: Tensor = layer.weight
    return weight.t() if isinstance(layer, Conv1D) else weight


def same_bias(layer: Any, original: Any) -> bool:
    if original.bias is None:
        return layer.bias is None
    return torch.equal(layer.bias, original.bias)


def note_many(packing: PackingByLoad, passes: int) -> None:
    for _ in range(passes):
        packing.note(MANY, 1)


def packed_among(layers: nn.Sequential) -> int:
    return sum(isinstance(layer, PackedLinear) for layer in layers)


def assert_same_products(layers: nn.Sequential, originals: nn.Sequential) -> None:
    for layer, original in zip(layers, originals, strict=True):
        for tokens in LENGTHS:
            inputs = torch.randn(1, tokens, weight_OI(original).shape[1])
            assert distance(layer(inputs), original(inputs)) <= WITHIN


@torch.inference_mode()
def test_products_are_the_same_before_a_change_after_each_layer_and_after_all() -> None:
    layers = linears()
    originals = copy.deepcopy(layers)
    packing = PackingByLoad(layers, 1)
    counts: list[int] = []
    for tokens, forwards in ((ONE, 1), (MANY, TO_PACK + 20), (ONE, TO_UNPACK + 20)):
        for _ in range(forwards):
            packing.note(tokens, 1)
            if not counts or packed_among(layers) != counts[-1]:
                counts.append(packed_among(layers))
                assert_same_products(layers, originals)
    # One at a time, all of them, and back.
    assert counts == [*range(len(layers) + 1), *reversed(range(len(layers)))]


@torch.inference_mode()
def test_weights_come_back_bit_for_bit() -> None:
    layers = linears()
    originals = copy.deepcopy(layers)
    drawn = torch.get_rng_state()
    packing = PackingByLoad(layers, 1)
    for tokens in [*[MANY] * 2 * TO_PACK, *[ONE] * 2 * TO_UNPACK]:
        packing.note(tokens, 1)
        for layer, original in zip(layers, originals, strict=True):
            assert torch.equal(weight_OI(layer), weight_OI(original))
            assert same_bias(layer, original)
    assert {type(layer) for layer in layers} == {nn.Linear}
    assert torch.equal(torch.get_rng_state(), drawn)


def test_sixteen_bits_are_packed_at_once_and_stay() -> None:
    layers = linears(torch.bfloat16)
    originals = copy.deepcopy(layers)
    pack_linear_layers(layers)
    packing = PackingByLoad(layers, 1)
    for tokens in [*[MANY] * 2 * TO_PACK, *[ONE] * 2 * TO_UNPACK]:
        packing.note(tokens, 1)
        assert packed_among(layers) == len(layers)
    for layer, original in zip(layers, originals, strict=True):
        assert torch.equal(weight_OI(layer), weight_OI(original))


@pytest.fixture
def blocks(models_dir: Path) -> Blocks:
    return load("llama", models_dir, Span(1, 4))


def load(family: str, models_dir: Path, span: Span) -> Blocks:
    checkpoint = open_local(save_tiny_model(family, models_dir))
    return load_blocks(checkpoint, span, dtype=torch.float32, device="cpu")


def turns(counts: list[int]) -> int:
    """How often a span began to be packed or to be unpacked."""
    pairs = itertools.pairwise([counts[0], *counts])
    upwards = [after > before for before, after in pairs if after != before]
    return len(list(itertools.groupby(upwards)))


def test_a_span_is_packed_under_the_load_of_many_rows_only(blocks: Blocks) -> None:
    layers = LAYERS * len(blocks.span)
    assert set(decode(blocks, ONE, 2 * TO_UNPACK)) == {0}
    counts = decode(blocks, MANY, TO_PACK + layers)
    assert counts[: TO_PACK - 1] == [0] * (TO_PACK - 1)
    assert counts[TO_PACK - 1 :] == [*range(1, layers + 1), layers]
    counts = decode(blocks, ONE, TO_UNPACK + layers)
    assert counts[: TO_UNPACK - 1] == [layers] * (TO_UNPACK - 1)
    assert counts[-1] == 0
    assert turns(counts) == 1


@pytest.mark.parametrize("few", range(1, 4))
def test_up_to_three_rows_leave_a_span_as_it_is(few: int, blocks: Blocks) -> None:
    assert set(decode(blocks, few, 3 * TO_PACK)) == {0}


@pytest.mark.parametrize(
    "pattern", [(ONE, MANY), (ONE,) * 5 + (MANY,), (ONE,) * 100 + (MANY,) * 50]
)
def test_a_mixed_load_packs_a_span_once(pattern: tuple[int, ...]) -> None:
    layers = linears()
    packing, counts = PackingByLoad(layers, 1), []
    for index in range(3000):
        packing.note(pattern[index % len(pattern)], 1)
        counts.append(packed_among(layers))
    assert counts[-1] == len(layers)
    assert turns(counts) == 1


def test_a_load_that_both_layouts_serve_alike_rarely_changes_them() -> None:
    layers, draw = linears(), random.Random(0)
    packing, counts = PackingByLoad(layers, 1), []
    for _ in range(20_000):
        packing.note(MANY if draw.random() < 1 / 11 else ONE, 1)
        counts.append(packed_among(layers))
    assert turns(counts) <= 20


def test_prompts_do_not_change_a_span(blocks: Blocks) -> None:
    row = new_row(blocks)
    for _ in range(3 * TO_PACK):
        row.truncate(0)
        forward(blocks, torch.randn(65, blocks.hidden_size), row)
    assert packed_layers(blocks) == 0


def test_a_measurement_does_not_change_a_span(blocks: Blocks) -> None:
    measure_throughput(blocks)
    assert packed_layers(blocks) == 0


def test_a_part_changes_with_its_span(blocks: Blocks) -> None:
    part, other = blocks.part(Span(1, 2)), blocks.part(Span(2, 4))
    hidden_TD = torch.randn(5, blocks.hidden_size)
    before = forward(other, hidden_TD, new_row(other))
    decode(part, MANY, (TO_PACK + LAYERS) * len(blocks.span))
    assert packed_layers(part) == LAYERS
    assert packed_layers(other) == 2 * LAYERS
    assert distance(forward(other, hidden_TD, new_row(other)), before) <= WITHIN
    assert part.weight_bytes * 3 == blocks.weight_bytes


def test_rows_that_run_one_after_another_are_not_many(models_dir: Path) -> None:
    blocks = load("bloom", models_dir, Span(1, 3))
    assert set(decode(blocks, MANY, 4 * TO_PACK)) == {0}
    row = new_row(blocks)
    for _ in range(TO_PACK):
        forward(blocks, torch.randn(MANY, blocks.hidden_size), row)
    assert packed_layers(blocks) > 0


def test_a_model_that_reads_its_weights_can(models_dir: Path) -> None:
    """BLOOM in slices, as it was trained."""
    blocks = load("bloom", models_dir, Span(1, 3))
    for module in blocks._decoder.modules():
        if hasattr(module, "slow_but_exact"):
            module.slow_but_exact, module.pretraining_tp = True, 2
    hidden_TD, row = torch.randn(MANY, blocks.hidden_size), new_row(blocks)
    before = forward(blocks, hidden_TD, row)
    for _ in range(2 * TO_PACK):
        row.truncate(0)
        after = forward(blocks, hidden_TD, row)
    assert packed_layers(blocks) == 8
    assert distance(after, before) <= WITHIN


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mixtral"])
def test_tokens_are_the_same_while_layers_change(family: str, models_dir: Path) -> None:
    folder = save_tiny_model(family, models_dir)
    model, prompt = reference(folder), prompt_ids(40)
    expected = greedy(model, prompt, NEW_TOKENS)
    chain = Chain(folder, spans=(Span(0, 6),))
    [blocks] = chain.blocks
    run, other = Run(chain), new_row(blocks)
    logits, tokens, counts = [run.step(prompt)], [], []
    for index in range(NEW_TOKENS):
        tokens.append(int(logits[-1][-1].argmax()))
        # Another session of many tokens at a time, and then, of one.
        many = index < NEW_TOKENS // 3
        for _ in range(4 if many else 20):
            other.truncate(0)
            forward(blocks, torch.randn(MANY if many else ONE, blocks.hidden_size), other)
        logits.append(run.step(tokens[-1:]))
        counts.append(packed_layers(blocks))
    assert tokens == expected
    with torch.inference_mode():
        expected_LV = model(torch.tensor([prompt + expected])).logits[0]
    assert distance(torch.cat(logits), expected_LV) <= 1e-4
    assert turns(counts) == 2
    assert len(set(counts)) > 3
    assert counts[-1] == 0


@pytest.mark.slow
def test_a_span_takes_no_more_memory_when_it_has_changed(tmp_path: Path) -> None:
    """In a process of its own, since others leave gaps that weights would fit into."""
    (weights, largest), *changes = figures(
        "packing_memory",
        tmp_path / "m",
        "1:9",
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=9,
        num_attention_heads=8,
    )
    assert weights > 90 << 20
    assert len(changes) == 4
    for after, peak in changes:
        assert after <= weights + largest
        assert peak <= weights + 3 * largest


def test_where_packing_fails_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = linears()
    packing = PackingByLoad(layers, 1)

    def no_memory(*_: object) -> NoReturn:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patched:
        patched.setattr(packed_linear, "PackedLinear", no_memory)
        note_many(packing, 4 * TO_PACK)
    assert packed_among(layers) == 0
    note_many(packing, 2 * TO_PACK + len(layers))
    assert packed_among(layers) == len(layers)


def test_a_part_of_the_blocks_gains_its_part() -> None:
    layers = linears()
    packing = PackingByLoad(layers, 4)
    note_many(packing, 2 * TO_PACK)
    assert packed_among(layers) == 0
    note_many(packing, 2 * TO_PACK + len(layers))
    assert packed_among(layers) == len(layers)
