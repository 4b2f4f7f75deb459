"""Linear layers whose weights lie in memory as oneDNN wants them.

In bfloat16 that is 2.2 x torch's own product for one token and 1.6 x for sixteen (measured on one
core with AVX512-BF16): there layers are packed when they are loaded. In float32 it is 1.5 and 1.7 x
for four and eight tokens, but 0.95 x for one, and both layouts at once would take twice the memory:
there layers are packed while a span has many tokens at a time, and turned back afterwards.
T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nesa_node.core.logging import get_logger

log = get_logger(__name__)

_BATCH_HINT = 16
_PRODUCTS_KEPT = 128
"""oneDNN compiles a product for every number of tokens and shape of a layer, and keeps it: as it
comes 1,024 of them in each of two caches, which came to 650 MiB for a tiny model that had seen 500
lengths. These are 32 lengths or so; to compile anew takes less than a prefill notices."""

for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # Read at the first product.
    os.environ.setdefault(_name, str(_PRODUCTS_KEPT))

_DTYPES = (torch.float32, torch.bfloat16)

MANY_TOKENS = 4
"""From here on a packed float32 layer is faster."""
MOST_TOKENS = 64
"""From here on there is little between them, and what is run is a prompt, which is soon over."""
GAINED_BY_MANY = 0.5
LOST_BY_FEW = 0.05
PRICE = 8.0
"""What a packed span gains with many tokens, what it loses with few, and what it takes to pack all
of it or to turn it back, in times of one token. Measured (250m, one core): eight tokens take 1.4
instead of 2.6, few of them and thirty gain less; 5 %; 7 to 10."""


class PackedLinear(nn.Module):
    """`x [..., I] -> x W + b [..., O]` on the CPU."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.weight_bytes = weight_OI.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _BATCH_HINT)
        self.bias = bias_O

    @property
    def weight(self) -> Tensor:
        """A copy [O, I] of what was packed, bit for bit."""
        weight_OI: Tensor = self._packed.to_dense()
        return weight_OI

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


def plain_linear(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    """torch's own layer of these, which are not copied."""
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias_O is not None:
        linear.bias = nn.Parameter(bias_O, requires_grad=False)
    return linear


def pack_linear_layers(root: nn.Module) -> None:
    """Replace linear layers in bfloat16 below `root` in place, one after another."""
    for parent, name in _places(root, torch.bfloat16):
        _pack(parent, name)
    _return_memory()


class PackingByLoad:
    """Packs the float32 linear layers of a span while it runs many tokens at a time.

    What the present layout has lost against the other is added up; what it wins is taken off, but
    no more than it had lost. Once the loss is the price of a change, the layers change, one per
    pass, so that no pass takes much longer. Thus changes cost no more than was lost before them,
    and a mix of loads comes to rest where it is served best.

    At no time is there more than one layer's weight in memory twice. Not thread-safe: it belongs to
    whoever runs the span.
    """

    def __init__(self, layers: nn.Module, blocks: int) -> None:
        """`layers` are those of so many blocks."""
        self._blocks = blocks
        self._places = _places(layers, torch.float32)
        self._wants_packed = False
        self._packed = 0  # that many of the places, from the first
        self._lost = 0.0

    def note(self, tokens: int, blocks: int) -> None:
        """Count a pass through so many of the blocks that is about to run with T = `tokens`."""
        if tokens <= MOST_TOKENS:
            gain = GAINED_BY_MANY if tokens >= MANY_TOKENS else -LOST_BY_FEW
            gain *= blocks / self._blocks
            self._lost = max(self._lost + (-gain if self._wants_packed else gain), 0.0)
        if self._lost >= PRICE:
            self._wants_packed, self._lost = not self._wants_packed, 0.0
        try:
            self._change_one()
        except (RuntimeError, MemoryError) as error:
            # No memory for it, say. What there is serves as well.
            log.warning("packing_failed", error=str(error)[:200])
            self._wants_packed, self._lost = not self._wants_packed, 0.0

    def _change_one(self) -> None:
        if self._wants_packed and self._packed < len(self._places):
            _pack(*self._places[self._packed])
            self._packed += 1
            _return_memory()
        elif not self._wants_packed and self._packed:
            _unpack(*self._places[self._packed - 1])
            self._packed -= 1
            _return_memory()


def _places(root: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Module, str]]:
    """Where linear layers of this dtype are below `root`: parents and names.

    Not the layers themselves: who held them would keep their weights when they are replaced.
    """
    return [
        (parent, name)
        for parent in root.modules()
        for name, child in parent._modules.items()
        if (type(child) is nn.Linear or isinstance(child, Conv1D))
        and child.weight.dtype == dtype
        and can_pack(child.weight)
    ]


def _pack(parent: nn.Module, name: str) -> None:
    child: Any = parent._modules[name]
    if isinstance(child, Conv1D):
        # Let go of the transposed weight before there is a third one.
        child = plain_linear(child.weight.t().contiguous(), child.bias)
        setattr(parent, name, child)
    setattr(parent, name, PackedLinear(child.weight, child.bias))


def _unpack(parent: nn.Module, name: str) -> None:
    child: Any = parent._modules[name]
    setattr(parent, name, plain_linear(child.weight, child.bias))


_malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)


def _return_memory() -> None:
    """Let glibc return what was freed: new weights do not fit into the gaps that old ones leave.

    Without it a span that was packed and unpacked twice took 2.3 x its size. Other C libraries have
    no such function.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
