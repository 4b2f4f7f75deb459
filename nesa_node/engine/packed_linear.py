"""Linear layers whose weights lie in memory as oneDNN wants them.

In bfloat16 that is 2.2 x torch's own product for one token and 1.6 x for sixteen (measured on one
core with AVX512-BF16). In float32 it is 1.3 to 1.7 x for four tokens to eight, but 0.9 x for one to
three, by which a token is judged: blocks are packed in bfloat16 only.
T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_BATCH_HINT = 16
_PRODUCTS_KEPT = 128
"""oneDNN compiles a product for every number of tokens and shape of a layer, and keeps it: as it
comes 1,024 of them in each of two caches, which came to 650 MiB for a tiny model that had seen 500
lengths. These are 32 lengths or so; to compile anew takes less than a prefill notices."""

for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # Read at the first product.
    os.environ.setdefault(_name, str(_PRODUCTS_KEPT))

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """`x [..., I] -> x W + b [..., O]` on the CPU; its weight cannot be read back as a tensor."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.weight_bytes = weight_OI.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _BATCH_HINT)
        self.bias = bias_O

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product in the dtype of the weights, which must be that of `inputs`."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self._packed, self.bias, "none", [], ""
        )
        return output


def can_pack(weight: Tensor) -> bool:
    """Whether a weight of this device and dtype gains from it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _DTYPES
        # torch states no types for it.
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and weight.ndim == 2
    )


def packed(module: nn.Module) -> PackedLinear | None:
    """Return what stands in for a linear layer; None for another module or where nothing is gained.

    Memory peaks at one weight above what the layers take together if each is replaced in turn.
    """
    if isinstance(module, Conv1D):
        weight_OI = module.weight.t()
    elif type(module) is nn.Linear:
        weight_OI = module.weight
    else:
        return None
    return PackedLinear(weight_OI, module.bias) if can_pack(weight_OI) else None


def pack_linear_layers(root: nn.Module) -> None:
    """Replace linear layers in bfloat16 below `root` in place, one after another."""
    # Only parents: a list that held the layers too would keep all their weights until the end.
    for parent in [module for module in root.modules() if module._modules]:
        for name in list(parent._modules):
            _replace(parent, name)


def _replace(parent: nn.Module, name: str) -> None:
    child = parent._modules[name]
    weight = getattr(child, "weight", None)
    if child is None or weight is None or weight.dtype != torch.bfloat16:
        return
    stand_in = packed(child)
    if stand_in is not None:
        setattr(parent, name, stand_in)
