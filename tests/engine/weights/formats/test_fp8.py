"""8-bit floats, against transformers' own dequantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.engine.weights.formats.small_floats import Fp8Format
from tests.engine.weights.formats.described import described

OUTPUTS, INPUTS = 96, 64


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return (100 * torch.randn(shape or (OUTPUTS, INPUTS), generator=generator)).to(
        torch.float8_e4m3fn
    )


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.5


def dequantized(stored: Tensor, scale: Tensor) -> Tensor:
    operation: Any = Fp8Dequantize
    made: Tensor = operation(None)._dequantize_one(stored, scale, output_dtype=torch.float32)
    return made


@pytest.mark.parametrize(
    "scale",
    [
        scales(3, 2),
        scales(3, 2).bfloat16(),
        scales(96, 1),
        scales(1, 1),
        torch.tensor([[126, 127], [128, 130], [100, 90]], dtype=torch.uint8),
    ],
)
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
def test_scales_are_as_transformers_applies_them(name: str, scale: Tensor, tmp_path: Path) -> None:
    tensors = {"a.weight": values(), f"a.{name}": scale}
    found = described(tmp_path, tensors, Fp8Format(((32, 32),)))
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"].read(tmp_path), dequantized(values(), scale))


def test_exponents_are_scales_of_a_dtype_of_their_own(tmp_path: Path) -> None:
    exponents = torch.tensor([[126, 127], [128, 130], [100, 90]], dtype=torch.uint8)
    tensors = {"a.weight": values(), "a.weight_scale": exponents.view(torch.float8_e8m0fnu)}
    found = described(tmp_path, tensors, Fp8Format(((32, 32),)))
    assert torch.equal(found["a.weight"].read(tmp_path), dequantized(values(), exponents))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_is_for_all(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {"a.weight": values(), "a.weight_scale": torch.full(shape, 0.5)}
    found = described(tmp_path, tensors, Fp8Format(()))
    assert torch.equal(found["a.weight"].read(tmp_path), values().float() / 2)


def test_stacked_experts_have_scales_each(tmp_path: Path) -> None:
    tensors = {"experts.up": values(3, 64, 32), "experts.up_scale_inv": scales(3, 2, 1)}
    read = described(tmp_path, tensors, Fp8Format(((32, 32),)))["experts.up"].read(tmp_path)
    for expert in range(3):
        expected = dequantized(values(3, 64, 32)[expert], scales(3, 2, 1)[expert])
        assert torch.equal(read[expert], expected)


def test_last_blocks_may_be_smaller(tmp_path: Path) -> None:
    """As in DeepSeek-V3, 576 rows of whose blocks of 128 leave 64."""
    scale = scales(3, 2)
    tensors = {"a.weight": values(), "a.weight_scale_inv": scale}
    read = described(tmp_path, tensors, Fp8Format(((40, 50),)))["a.weight"].read(tmp_path)
    whole = scale.repeat_interleave(40, 0)[:OUTPUTS].repeat_interleave(50, 1)[:, :INPUTS]
    assert torch.equal(read, values().float() * whole)


def test_large_weights_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a.weight": values(), "a.weight_scale_inv": scales(3, 2)}
    found = described(tmp_path, tensors, Fp8Format(((32, 32),)))["a.weight"]
    whole = found.read(tmp_path)
    monkeypatch.setattr("nesa_node.engine.weights.formats.quantized_tensor.CHUNK_VALUES", 1)
    assert torch.equal(found.read(tmp_path), whole)


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (scales(4, 2), r"a scale of shape \[4, 2\] fits none"),
        (scales(2, 3), "fits none"),
        (scales(0, 2), r"a\.weight_scale is float32\[0, 2\]"),
        (scales(1, 1, 1), "a.weight is float8_e4m3fn"),
        (torch.ones(3, 2, dtype=torch.int64), r"a\.weight_scale is int64\[3, 2\]"),
    ],
)
def test_other_scales_are_refused(scale: Tensor, told: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=told):
        described(tmp_path, {"a.weight": values(), "a.weight_scale": scale}, Fp8Format(((32, 32),)))


@pytest.mark.parametrize("stored_format", [None, Fp8Format(())])
def test_floats_of_eight_bits_without_a_scale_are_refused(
    stored_format: Any, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'a\.weight' is float8_e4m3fn\[96, 64\]"):
        described(tmp_path, {"a.weight": values()}, stored_format)
