"""4-bit floats, against transformers' gpt-oss and their definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nesa_node.core.errors import CorruptCheckpointError
from nesa_node.engine.weights.formats.compressed import CompressedFormat
from nesa_node.engine.weights.formats.small_floats import Mxfp4Format
from tests.engine.weights.formats.described import described

EXPERTS, OUTPUTS, GROUPS = 3, 40, 2


def numbers(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(low, high, shape, generator=generator).to(torch.uint8)


def blocks() -> Tensor:
    return numbers(EXPERTS, OUTPUTS, GROUPS, 16)


def exponents() -> Tensor:
    return numbers(EXPERTS, OUTPUTS, GROUPS, low=110, high=140)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_as_transformers_unpacks_them(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"experts.up_blocks": blocks(), "experts.up_scales": exponents()}
    found = described(tmp_path, tensors, Mxfp4Format())
    assert found.keys() == {"experts.up"}
    assert found["experts.up"].shape == (EXPERTS, 32 * GROUPS, OUTPUTS)
    expected = convert_moe_packed_tensors(blocks(), exponents(), dtype=dtype)
    assert torch.equal(found["experts.up"].read(tmp_path).to(dtype), expected)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"a_scales": None}, "a_scales is missing"),
        ({"a_scales": exponents()[:2]}, "do not belong together"),
        ({"a_scales": exponents().float()}, r"a_scales is float32\[3, 40, 2\]"),
        ({"a_blocks": numbers(3, 40, 2, 15)}, "do not belong together"),
        ({"a_blocks": numbers(3, 80, 16)}, r"a_blocks is uint8\[3, 80, 16\]"),
        ({"a": torch.ones(3, 64, 40)}, "a is stored twice"),
    ],
)
def test_other_tensors_are_refused(
    change: dict[str, Tensor | None], told: str, tmp_path: Path
) -> None:
    changed = {"a_blocks": blocks(), "a_scales": exponents()} | change
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(CorruptCheckpointError, match=told):
        described(tmp_path, tensors, Mxfp4Format())


def test_two_scales_of_nvfp4_multiply_and_divide(tmp_path: Path) -> None:
    packed, scale = numbers(OUTPUTS, 24), (numbers(OUTPUTS, 3).float() + 1).to(torch.float8_e4m3fn)
    tensors = {
        "a.weight_packed": packed,
        "a.weight_scale": scale,
        "a.weight_global_scale": torch.tensor([37.5]),
    }
    read = described(tmp_path, tensors, CompressedFormat(()))["a.weight"].read(tmp_path)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for row in range(OUTPUTS):
        for column in range(48):
            byte = int(packed[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            value = magnitudes[code & 7] * (-1 if code & 8 else 1)
            expected = value * float(scale[row, column // 16]) / 37.5
            assert float(read[row, column]) == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"a.weight_scale": torch.ones(OUTPUTS, 3)}, r"a\.weight_scale is float32\[40, 3\]"),
        ({"a.weight_scale": numbers(OUTPUTS, 3)}, "a.weight_scale is uint8"),
        ({"a.weight_global_scale": torch.ones(2)}, "do not belong together"),
        ({"a.weight_global_scale": None}, "a.weight_scale is float8_e4m3fn"),
        ({"a.weight_packed": numbers(OUTPUTS, 32)}, "do not belong together"),
    ],
)
def test_other_tensors_of_nvfp4_are_refused(
    change: dict[str, Tensor | None], told: str, tmp_path: Path
) -> None:
    changed = {
        "a.weight_packed": numbers(OUTPUTS, 24),
        "a.weight_scale": torch.ones(OUTPUTS, 3).to(torch.float8_e4m3fn),
        "a.weight_global_scale": torch.ones(1),
    } | change
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(CorruptCheckpointError, match=told):
        described(tmp_path, tensors, CompressedFormat(()))
