"""bitsandbytes' own quantized layers, and models of transformers made of them."""

from __future__ import annotations

from typing import Any

import bitsandbytes
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.kernels.linear import make_linear
from nesa_node.engine.kernels.quantized_linear import BLOCK_SIZE, MAX_LEVEL

_LAYERS: Any = bitsandbytes.nn
_FUNCTIONS: Any = bitsandbytes.functional
THRESHOLD = 6.0
"""Of outliers in LLM.int8()."""


def int8_layer(weight_OI: Tensor, bias_O: Tensor | None) -> Any:
    outputs, inputs = weight_OI.shape
    made = _LAYERS.Linear8bitLt(
        inputs, outputs, bias=bias_O is not None, has_fp16_weights=False, threshold=THRESHOLD
    )
    made.weight = _LAYERS.Int8Params(weight_OI.clone(), requires_grad=False, has_fp16_weights=False)
    return _with_bias(made, bias_O).eval()


def int8_and_back(weight_OI: Tensor) -> Tensor:
    levels_OI, scales_O, _ = _FUNCTIONS.int8_vectorwise_quant(weight_OI.half())
    weight: Tensor = levels_OI * (scales_O / MAX_LEVEL).unsqueeze(1)
    return weight


def nf4_layer(weight_OI: Tensor, bias_O: Tensor | None) -> Any:
    outputs, inputs = weight_OI.shape
    if inputs % BLOCK_SIZE:
        return make_linear(nf4_and_back(weight_OI), bias_O)
    made = _LAYERS.Linear4bit(inputs, outputs, bias=bias_O is not None, quant_type="nf4")
    made.weight = _LAYERS.Params4bit(
        weight_OI.clone(),
        requires_grad=False,
        quant_type="nf4",
        blocksize=BLOCK_SIZE,
        compress_statistics=False,
    )
    # In training, or it would compute in bfloat16 on processors that do.
    return _with_bias(made, bias_O)


def nf4_and_back(weight_OI: Tensor) -> Tensor:
    """By blocks: on the CPU bitsandbytes (0.50) mistakes rows that are no whole number of them."""
    blocks = weight_OI.reshape(-1, BLOCK_SIZE)
    packed, state = _FUNCTIONS.quantize_4bit(blocks, blocksize=BLOCK_SIZE, quant_type="nf4")
    weight: Tensor = _FUNCTIONS.dequantize_4bit(packed, state)
    return weight.view(weight_OI.shape)


def stacked_weights(experts: nn.Module) -> dict[str, bool]:
    """Names of the stacked weights of a mixture's experts, and whether matrices are [I, O]."""
    if type(experts).__name__ == "Llama4TextExperts":
        return {"gate_up_proj": True, "down_proj": True}
    transposed = getattr(experts, "is_transposed", None)
    names = ("gate_up_proj", "down_proj")
    return {} if transposed is None else dict.fromkeys(names, bool(transposed))


def quantize_experts(experts: nn.Module, quant_type: QuantType) -> int:
    """Give each expert bitsandbytes' weights, dequantized; return how many matrices there were."""
    convert = int8_and_back if quant_type == "int8" else nf4_and_back
    count = 0
    for name, is_transposed in stacked_weights(experts).items():
        for matrix in experts.get_parameter(name).data:
            view_OI = matrix.t() if is_transposed else matrix
            view_OI.copy_(convert(view_OI.contiguous()))
            count += 1
    return count


def quantize(layers: nn.Module, quant_type: QuantType) -> int:
    """Replace all linear layers below by some with bitsandbytes' weights, and the weights of
    experts by theirs; return how many there were. In int8 layers are torch's own, since
    bitsandbytes' round inputs, too."""
    count = 0
    for parent in list(layers.modules()):
        count += quantize_experts(parent, quant_type)
        children: dict[str, Any] = parent._modules
        for name, child in children.items():
            kinds = (type(parent).__name__, type(child).__name__)  # Llama 4's is a subclass
            is_router = any(kind.endswith(("Router", "Gate")) for kind in kinds)
            if isinstance(child, nn.Linear | Conv1D) and not is_router:
                weight = child.weight.detach()
                weight_OI = weight.t().contiguous() if isinstance(child, Conv1D) else weight
                if quant_type == "int8":
                    made = make_linear(int8_and_back(weight_OI), child.bias)
                else:
                    made = nf4_layer(weight_OI, child.bias)
                setattr(parent, name, made)
                count += 1
    return count


def _with_bias(made: Any, bias_O: Tensor | None) -> Any:
    if bias_O is not None:
        made.bias = nn.Parameter(bias_O.clone(), requires_grad=False)
    return made.to("cpu")
