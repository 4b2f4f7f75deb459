"""GPTQ's and AWQ's words, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nesa_node.core.errors import CorruptCheckpointError
from nesa_node.engine.weights.formats.packed_columns import AwqFormat, GptqFormat
from nesa_node.engine.weights.formats.quantized_tensor import unpack_integers
from nesa_node.engine.weights.formats.stored_format import StoredFormat
from tests.engine.weights.formats.described import described

INPUTS, OUTPUTS = 64, 32


def test_three_bits_follow_each_other_through_three_words() -> None:
    """As AutoGPTQ writes them: ten values, two bits of the next, and its third in the next word."""
    numbers = [each % 8 for each in range(5, 37)]
    words = [0, 0, 0]
    for place, number in enumerate(numbers):
        for bit in range(3):
            word, shift = divmod(3 * place + bit, 32)
            words[word] |= (number >> bit & 1) << shift
    assert words[0] >> 30 == numbers[10] & 3
    assert words[1] & 1 == numbers[10] >> 2
    packed = torch.tensor([words], dtype=torch.int64).to(torch.int32)
    assert unpack_integers(packed, 3).tolist() == [numbers]


@pytest.mark.parametrize(("bits", "word"), [(2, 0xE4), (4, 0x3210), (8, 0x03020100)])
def test_the_first_value_lies_in_the_lowest_bits(bits: int, word: int) -> None:
    packed = torch.tensor([[word]], dtype=torch.int32)
    assert unpack_integers(packed, bits)[0, :4].tolist() == [0, 1, 2, 3]


def gptq_tensors() -> dict[str, Tensor]:
    """A layer whose numbers are all 5 in 4 bits, two groups, zero points 3 and scales 2 and 4."""
    return {
        "a.qweight": torch.full((INPUTS // 8, OUTPUTS), 0x55555555, dtype=torch.int32),
        "a.qzeros": torch.full((2, OUTPUTS // 8), 0x33333333, dtype=torch.int32),
        "a.scales": torch.tensor([[2.0], [4.0]]).expand(2, OUTPUTS).contiguous(),
    }


@pytest.mark.parametrize(("offset", "whole"), [(1, 1.0), (0, 2.0)])
def test_the_first_version_has_zero_points_less_one(
    offset: int, whole: float, tmp_path: Path
) -> None:
    found = described(tmp_path, gptq_tensors(), GptqFormat(4, 32, offset, False))
    assert found.keys() == {"a.weight"}
    expected = torch.full((OUTPUTS, INPUTS), whole)
    expected[:, :32] *= 2
    expected[:, 32:] *= 4
    assert torch.equal(found["a.weight"].read(tmp_path), expected)


def test_columns_have_the_groups_that_are_stored(tmp_path: Path) -> None:
    groups = torch.tensor([0, 1] * (INPUTS // 2), dtype=torch.int32)
    tensors = gptq_tensors() | {"a.g_idx": groups}
    read = described(tmp_path, tensors, GptqFormat(4, 32, 1, False))["a.weight"].read(tmp_path)
    assert read[0, :4].tolist() == [2.0, 4.0, 2.0, 4.0]


def test_groups_that_were_never_written_are_runs(tmp_path: Path) -> None:
    tensors = gptq_tensors() | {"a.g_idx": torch.zeros(INPUTS, dtype=torch.int32)}
    read = described(tmp_path, tensors, GptqFormat(4, 32, 1, False))["a.weight"].read(tmp_path)
    assert read[0, 31:33].tolist() == [2.0, 4.0]


@pytest.mark.parametrize("group", [2, -1, 2**31 - 1])
def test_a_group_without_a_scale_is_refused(group: int, tmp_path: Path) -> None:
    groups = torch.zeros(INPUTS, dtype=torch.int32)
    groups[7] = group
    found = described(tmp_path, gptq_tensors() | {"a.g_idx": groups}, GptqFormat(4, 32, 1, False))
    with pytest.raises(CorruptCheckpointError, match=r"a\.weight: a column's group is none of"):
        found["a.weight"].read(tmp_path)


def test_bits_of_one_layer_may_differ_where_the_config_has_exceptions(tmp_path: Path) -> None:
    eight = {
        "b.qweight": torch.full((INPUTS // 4, OUTPUTS), 0x05050505, dtype=torch.int32),
        "b.qzeros": torch.full((1, OUTPUTS // 4), 0x03030303, dtype=torch.int32),
        "b.scales": torch.ones(1, OUTPUTS),
        "b.g_idx": torch.zeros(INPUTS, dtype=torch.int32),
    }
    tensors = gptq_tensors() | eight
    found = described(tmp_path, tensors, GptqFormat(4, 32, 1, True))
    assert torch.equal(found["b.weight"].read(tmp_path), torch.ones(OUTPUTS, INPUTS))
    assert found["a.weight"].shape == (OUTPUTS, INPUTS)
    with pytest.raises(CorruptCheckpointError, match="do not belong together"):
        described(tmp_path, tensors, GptqFormat(4, 32, 1, False))


def test_awq_interleaves_eight_outputs(tmp_path: Path) -> None:
    tensors = {
        "a.qweight": torch.full((INPUTS, 1), 0x75316420, dtype=torch.int32),
        "a.qzeros": torch.full((2, 1), 0x11111111, dtype=torch.int32),
        "a.scales": torch.full((2, 8), 0.5),
    }
    read = described(tmp_path, tensors, AwqFormat(32))["a.weight"].read(tmp_path)
    assert read.shape == (8, INPUTS)
    assert read[:, 63].tolist() == [0.5 * (each - 1) for each in range(8)]


@pytest.mark.parametrize("stored_format", [GptqFormat(4, 32, 1, False), AwqFormat(32)])
@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("a.scales", None, "a.scales is missing"),
        ("a.qzeros", None, "a.qzeros is missing"),
        ("a.scales", torch.ones(3, 5), "do not belong together"),
        ("a.qzeros", torch.ones(9, 4, dtype=torch.int32), "do not belong together"),
        ("a.scales", torch.ones(2, OUTPUTS, dtype=torch.int64), r"a.scales is int64\[2, 32\]"),
        ("a.qweight", torch.ones(8, dtype=torch.int32), r"a.qweight is int32\[8\]"),
        ("a.qweight", torch.ones(0, 8, dtype=torch.int32), r"a.qweight is int32\[0, 8\]"),
        ("a.weight", torch.ones(OUTPUTS, INPUTS), "a.weight is stored twice"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(
    stored_format: StoredFormat, name: str, tensor: Tensor | None, told: str, tmp_path: Path
) -> None:
    tensors = gptq_tensors()
    if isinstance(stored_format, AwqFormat):
        tensors["a.qweight"] = torch.full((INPUTS, OUTPUTS // 8), 7, dtype=torch.int32)
    described(tmp_path, tensors, stored_format)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(CorruptCheckpointError, match=told):
        described(tmp_path, tensors, stored_format)
