"""What is handed to tiles, on every processor: their product is made by torch here.

T tokens, I inputs, O outputs, W room for tokens in tiles.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.engine.kernels.linear import TILE_TOKENS, AmxMatmul


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Product:
    """Takes the arguments of the machine code for `wide` tiles of tokens."""

    def __init__(self, wide: int) -> None:
        self._tokens = wide * TILE_TOKENS

    def bind(
        self,
        weight: int,
        room: int,
        bias: int,
        output: int,
        inputs: int,
        outputs: int,
        tokens: int,
        *,
        threads: int,
    ) -> Any:
        pairs_IW2 = tensor_at(room, (inputs // 2, self._tokens, 2), torch.bfloat16)
        weight_OI = tensor_at(weight, (outputs, inputs), torch.bfloat16)
        bias_O = tensor_at(bias, (outputs,), torch.float32)
        output_TO = tensor_at(output, (tokens, outputs), torch.bfloat16)

        def run() -> None:
            input_TI = pairs_IW2.transpose(0, 1).reshape(self._tokens, inputs)[:tokens]
            output_TO.copy_(input_TI.float() @ weight_OI.float().t() + bias_O)

        return SimpleNamespace(run=run)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32])
def test_tiles_multiply_the_inputs_that_they_are_given(tokens: int) -> None:
    torch.manual_seed(tokens)
    input_TI = torch.randn(tokens, 64).bfloat16()
    weight_OI, bias_O = torch.randn(96, 64).bfloat16(), torch.randn(96)
    products: Any = [Product(1), Product(2)]
    output_TO = AmxMatmul(products)(input_TI, weight_OI, bias_O)
    expected_TO = input_TI.double() @ weight_OI.double().t() + bias_O
    assert (output_TO - expected_TO).abs().max() <= 2**-8 * expected_TO.abs().max()
