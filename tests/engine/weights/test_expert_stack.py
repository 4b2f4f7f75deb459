from __future__ import annotations

import copy
import weakref
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from nesa_node.core.errors import CorruptCheckpointError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.expert_stacks import is_expert_stacking, stack_experts
from tests.engine.chained import open_local
from tests.engine.layouts import Tensors, rewritten
from tests.engine.tiny_models import save_tiny_model

GATE_UP = WeightConverter(
    [".experts.*.w1.weight", ".experts.*.w3.weight"],
    ".experts.gate_up_proj",
    [MergeModulelist(dim=0), Concatenate(dim=1)],
)
DOWN = WeightConverter(".experts.*.w2.weight", ".experts.down_proj", [MergeModulelist(dim=0)])


@pytest.mark.parametrize(("converter", "kinds"), [(GATE_UP, ["w1", "w3"]), (DOWN, ["w2"])])
def test_stacking_gives_what_transformers_gives(
    converter: WeightConverter, kinds: list[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    names = []
    for expert in range(12):
        for pattern, kind in zip(converter.source_patterns, kinds, strict=True):
            name = f"l.experts.{expert}.{kind}.weight"
            tensors[name] = torch.randn(5, 3, generator=generator)
            names.append((pattern, name))
    slow = copy.deepcopy(converter)
    target = f"l{converter.target_patterns[0]}"
    for pattern, name in names:
        slow.add_tensor(target, name, pattern, partial(tensors.__getitem__, name))  # type: ignore[arg-type]
    expected = slow.convert(target)[target]
    expected = expected[0] if isinstance(expected, list) else expected
    assert is_expert_stacking(converter)
    assert torch.equal(stack_experts(converter, names, tensors.__getitem__), expected)


@pytest.mark.parametrize(
    "converter",
    [
        WeightConverter("qkv", ["q", "k", "v"], [Chunk(dim=0)]),
        WeightConverter(["a", "b"], "ab", [Concatenate(dim=0)]),
        WeightConverter("e.*.a", "ea", [MergeModulelist(dim=0), Transpose(1, 2)]),
        WeightConverter("e.*.a", "ea", [MergeModulelist(dim=1)]),
        WeightConverter(["e.*.a", "e.*.b"], "e", [MergeModulelist(dim=0), Concatenate(dim=2)]),
    ],
)
def test_other_conversions_are_left_to_transformers(converter: WeightConverter) -> None:
    assert not is_expert_stacking(converter)


@pytest.mark.parametrize("quant_type", get_args(QuantType))
@pytest.mark.parametrize("what", ["missing", "misshapen"])
def test_a_spoiled_expert_is_named(
    what: str, quant_type: QuantType, models_dir: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"

    def spoil(tensors: Tensors) -> Tensors:
        tensor = tensors.pop(name)
        return tensors if what == "missing" else {**tensors, name: tensor[:7]}

    folder = rewritten(save_tiny_model("mixtral", models_dir), tmp_path / "m", spoil)
    with pytest.raises(CorruptCheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        load_blocks(
            open_local(folder),
            Span(0, 2),
            dtype=torch.float32,
            device="cpu",
            quant_type=quant_type,
        )


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_experts_are_quantized_one_after_another(quant_type: QuantType, models_dir: Path) -> None:
    """No more than one expert's matrices are held as the checkpoint has them."""
    checkpoint = open_local(save_tiny_model("mixtral", models_dir))
    read, most = checkpoint.read, 0
    held: list[weakref.ref[Tensor]] = []

    def watch(name: str) -> Tensor:
        nonlocal most
        tensor = read(name)
        if ".experts." in name:
            held[:] = [each for each in held if each() is not None]
            held.append(weakref.ref(tensor))
            most = max(most, len(held))
        return tensor

    checkpoint.read = watch  # type: ignore[method-assign]
    load_blocks(checkpoint, Span(0, 2), dtype=torch.float32, device="cpu", quant_type=quant_type)
    assert most == 2  # of the two kinds that are concatenated
