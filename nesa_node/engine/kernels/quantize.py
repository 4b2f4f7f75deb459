"""Selection of the weights of a span that are quantized, and their size.

Only those of the blocks' linear layers; norms, biases, routers and the stacked experts of a mixture
keep their dtype, as with bitsandbytes. O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.kernels import int8, nf4
from nesa_node.engine.kernels.int8 import Int8Linear
from nesa_node.engine.kernels.nf4 import Nf4Linear

QuantizedLinear = Int8Linear | Nf4Linear


def is_quantizable(module: nn.Module) -> bool:
    """Whether a module's weight is quantized: plain linear layers, not subclasses."""
    # Falcon's own linear layer by name, since its import takes a quarter of a second.
    return type(module) in (nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"


def compute_quantized_bytes(module: nn.Module, quant_type: QuantType) -> int:
    """Return the bytes of the layer's quantized weight. Raises `UnsupportedModelError`."""
    outputs, inputs = _weight_shape(module)
    if quant_type == "int8":
        return int8.compute_nbytes(outputs, inputs)
    if not nf4.is_quantizable_shape(outputs, inputs):
        raise UnsupportedModelError(
            f"nf4 holds weights in blocks of {nf4.BLOCK_SIZE}, of which a layer of {outputs} x "
            f"{inputs} has no whole number; use --quant-type int8"
        )
    return nf4.compute_nbytes(outputs, inputs)


def make_quantized_linear(
    module: nn.Module,
    weight: Tensor,
    quant_type: QuantType,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> QuantizedLinear:
    """Return a quantized layer with this weight, and with the bias of `module`.

    Quantized on the CPU, so that every machine holds the same bytes, then moved to `device`.
    `dtype` is that of the inputs. Raises `UnsupportedModelError` for weights beyond the range of
    float16.
    """
    weight_OI = weight.t() if isinstance(module, Conv1D) else weight
    bias_O = module.bias if isinstance(module.bias, nn.Parameter) else None
    if quant_type == "int8":
        levels_OI, scales_O = int8.quantize(weight_OI)
        return Int8Linear(levels_OI.to(device), scales_O.to(device), bias_O, dtype)
    packed, peaks = nf4.quantize(weight_OI)
    return Nf4Linear(packed.to(device), peaks.to(device), weight_OI.shape, bias_O, dtype)


def _weight_shape(module: nn.Module) -> tuple[int, int]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
