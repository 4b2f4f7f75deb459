"""Tensors of compressed-tensors, against what the library itself makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.core.errors import CorruptCheckpointError
from nesa_node.engine.weights.formats.compressed import CompressedFormat, PackedScheme
from nesa_node.engine.weights.formats.quantization_config import find_format
from nesa_node.engine.weights.formats.stored_format import StoredFormat, Tensors
from tests.engine.stored_weights import compressed, compressed_config
from tests.engine.weights.formats.described import described

OUTPUTS, INPUTS = 72, 96
INT: dict[str, Any] = {"type": "int", "num_bits": 4}
FLOAT: dict[str, Any] = {"type": "float", "num_bits": 8}
ASYMMETRIC: dict[str, Any] = {"symmetric": False}
GROUPS: dict[str, Any] = {"strategy": "group", "group_size": 32}
ROWS: dict[str, Any] = {"strategy": "channel"}
WHOLE: dict[str, Any] = {"strategy": "tensor"}


def weight() -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(OUTPUTS, INPUTS, generator=generator, dtype=torch.float64) + 0.2


def packed(kind: str, **weights: Any) -> tuple[dict[str, Tensor], Tensor]:
    stored, whole = compressed(kind, **weights)(weight().numpy())
    return {f"a.{name}": tensor.contiguous() for name, tensor in stored.items()}, whole


def format_of(kind: str, **weights: Any) -> StoredFormat:
    raw = {"quantization_config": compressed_config(kind, **weights)}
    found = find_format(raw, name="m")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("pack-quantized", INT | GROUPS),
        ("pack-quantized", INT | GROUPS | ASYMMETRIC),
        ("pack-quantized", INT | ROWS),
        ("pack-quantized", INT | ROWS | ASYMMETRIC),
        ("pack-quantized", INT | WHOLE),
        ("pack-quantized", INT | GROUPS | {"num_bits": 8}),
        ("pack-quantized", INT | ROWS | ASYMMETRIC | {"num_bits": 8}),
        ("pack-quantized", INT | GROUPS | ASYMMETRIC | {"num_bits": 2}),
        ("int-quantized", INT | ROWS | {"num_bits": 8}),
        ("int-quantized", INT | ROWS | ASYMMETRIC | {"num_bits": 8}),
        ("int-quantized", INT | GROUPS | ASYMMETRIC | {"num_bits": 8}),
        ("int-quantized", INT | WHOLE | ASYMMETRIC | {"num_bits": 8}),
        ("naive-quantized", INT | ROWS | {"num_bits": 4}),
        ("float-quantized", FLOAT | WHOLE),
        ("float-quantized", FLOAT | ROWS),
        ("float-quantized", FLOAT | {"strategy": "block", "block_structure": [40, 50]}),
        ("mxfp8-quantized", FLOAT | GROUPS | {"scale_dtype": torch.uint8}),
        ("mxfp4-pack-quantized", FLOAT | GROUPS | {"num_bits": 4, "scale_dtype": torch.uint8}),
        (
            "nvfp4-pack-quantized",
            {
                "type": "float",
                "num_bits": 4,
                "strategy": "tensor_group",
                "group_size": 16,
                "scale_dtype": torch.float8_e4m3fn,
            },
        ),
    ],
)
def test_weights_are_what_the_library_makes_of_them(
    kind: str, weights: dict[str, Any], tmp_path: Path
) -> None:
    tensors, whole = packed(kind, **weights)
    stated = {name: value for name, value in weights.items() if name != "scale_dtype"}
    found = described(tmp_path, tensors, format_of(kind, **stated))
    assert "a.weight" in found
    read = found["a.weight"].read(tmp_path)
    assert read.shape == (OUTPUTS, INPUTS)
    assert (whole - weight().float()).abs().max() > 0
    # The library computes NVFP4 in bfloat16; `test_small_floats.py` has it in float64.
    tolerance = 2**-7 if kind.startswith("nvfp4") else 2e-7
    torch.testing.assert_close(read, whole, rtol=tolerance, atol=0)


def test_columns_have_the_groups_that_are_stored(tmp_path: Path) -> None:
    tensors, whole = packed("pack-quantized", **INT | GROUPS)
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))
    group_I = torch.arange(INPUTS)[order] // 32
    found = described(
        tmp_path, tensors | {"a.weight_g_idx": group_I}, format_of("pack-quantized", **INT | GROUPS)
    )
    scale = tensors["a.weight_scale"]
    numbers = whole / scale[:, torch.arange(INPUTS) // 32]
    expected = numbers.round() * scale[:, group_I]
    assert torch.equal(found["a.weight"].read(tmp_path), expected)


MIXED = CompressedFormat((PackedScheme(4, 32), PackedScheme(8, 32), PackedScheme(4, 16)))


@pytest.mark.parametrize("weights", [INT | GROUPS, INT | GROUPS | {"num_bits": 8}])
def test_of_several_schemes_that_of_the_shapes_is_taken(
    weights: dict[str, Any], tmp_path: Path
) -> None:
    tensors, whole = packed("pack-quantized", **weights)
    assert torch.equal(described(tmp_path, tensors, MIXED)["a.weight"].read(tmp_path), whole)


def change(tensors: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    changed = tensors | {f"a.{name}": tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in changed.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weight_scale": None}, "a.weight_scale is missing"),
        ({"weight_shape": None}, "a.weight_shape is missing"),
        ({"weight_shape": torch.tensor([1, 2, 3])}, "a shape or zero points of another size"),
        ({"weight_scale": torch.ones(OUTPUTS, 4)}, "none of its config's schemes fit"),
        ({"weight_scale": torch.ones(3, 3)}, "none of its config's schemes fit"),
        ({"weight_zero_point": torch.ones(9, 4, dtype=torch.int32)}, "of another size"),
        ({"weight_zero_point": torch.ones(9, 3, dtype=torch.int64)}, "which its format has not"),
        ({"weight_g_idx": torch.zeros(95, dtype=torch.int32)}, "none of its config's schemes"),
        ({"weight_packed": torch.ones(OUTPUTS, 12)}, r"a.weight_packed is float32\[72, 12\]"),
        ({"weight": torch.ones(OUTPUTS, INPUTS)}, "a.weight"),
    ],
)
def test_other_tensors_are_refused(
    changes: dict[str, Tensor | None], told: str, tmp_path: Path
) -> None:
    tensors, _ = packed("pack-quantized", **INT | GROUPS)
    with pytest.raises(CorruptCheckpointError, match=told):
        described(tmp_path, change(tensors, **changes), format_of("pack-quantized", **INT | GROUPS))


def read(tensors: Tensors, folder: Path) -> Tensor:
    return tensors["a.weight"].read(folder)


@pytest.mark.parametrize("told", [[72, 95], [72, 2**40], [-1, 96]])
def test_a_shape_that_is_not_that_of_the_words_is_refused(told: list[int], tmp_path: Path) -> None:
    tensors, _ = packed("pack-quantized", **INT | GROUPS)
    changed = change(tensors, weight_shape=torch.tensor(told))
    found = described(tmp_path, changed, format_of("pack-quantized", **INT | GROUPS))
    with pytest.raises(CorruptCheckpointError, match=r"a\.weight: its weight_shape is"):
        read(found, tmp_path)


def test_two_schemes_that_fit_are_refused(tmp_path: Path) -> None:
    tensors, _ = packed("pack-quantized", **INT | ROWS)
    both = CompressedFormat((PackedScheme(4, None), PackedScheme(8, None)))
    with pytest.raises(CorruptCheckpointError, match="which several of its config's schemes fit"):
        described(tmp_path, tensors, both)


def test_weights_that_are_not_compressed_yet_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(4, 4), "a.weight_scale": torch.ones(4, 1)}
    with pytest.raises(CorruptCheckpointError, match="is float32 beside a scale"):
        described(tmp_path, tensors, CompressedFormat(()))
