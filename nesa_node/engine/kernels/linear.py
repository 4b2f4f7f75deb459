"""Linear layers that choose the fastest product for the number of tokens.

On the CPU, measured on one core of a Xeon with AVX-512 and AMX, as gigabytes of weights per second:

| tokens | ours (`matmul.py`) | torch, weight x tokens | torch, tokens x weight |
|-|-|-|-|
| float32: 1, 4, 8 | 12.6, 11.0, 11.1 | 10.6, 6.6, 7.5 | 10.3, 6.0, 5.0 |
| float32: 16, 32, 64 | - | 7.9, 6.4, 3.2 | 6.3, 4.5, 2.9 |
| bfloat16: 1, 4, 8 | 13.6, 11.5, 9.1 | 8.2, 11.4, 11.1 | 7.5, 7.8, 7.7 |
| bfloat16: 16, 32, 64 | - | 9.8, 8.7, 8.1 | 6.6, 6.5, 5.5 |

Measured separately, in bfloat16 with 1,024 inputs: ours on AMX (`matmul.py`), `matmul.py`, and
torch as weight x tokens:

| tokens | 1 | 2 | 4 | 8 | 16 | 32 |
|-|-|-|-|-|-|-|
| tiles | 10.9 | 11.2 | 11.8 | 13.3 | 12.7 | 9.6 |
| gemv | 11.4 | 10.5 | 10.7 | 9.9 | - | - |
| torch | 6.2 | 6.7 | 7.8 | 10.9 | 9.9 | 7.1 |

Decoding reads every weight once per step, so that memory bandwidth bounds it. Our products read a
weight in memory order and prefetch far ahead; those on AMX read it once for all tokens, at memory
bandwidth for up to 16. A token's result has the same bits for any batch.

T tokens, I inputs, O outputs, R rows of weights.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nesa_node.engine.kernels.machine_code import (
    CACHE_LINE_BYTES,
    KernelCall,
    NativeFunction,
    compile_functions,
    copy_to_huge_pages,
)

GEMV_MAX_TOKENS = 8
GEMV_MIN_OUTPUTS = 2
"""Rows of weights that are read at a time."""
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Gemv:
    """Product x [T, I] -> x W^T + b [T, O] for up to `GEMV_MAX_TOKENS` tokens of one dtype."""

    functions: list[NativeFunction]
    """For 1, 2, ... tokens."""

    def __call__(self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        """Return the product [T, O] in the dtype of `weight_OI`, which `supports_gemv`.

        `input_TI` has that dtype, `bias_O` is float32 and contiguous. Sums are float32, rounded
        once. Runs on torch's threads.
        """
        input_TI = input_TI.float().contiguous()
        output_TO = torch.empty(len(input_TI), len(weight_OI), dtype=weight_OI.dtype)
        self.bind(input_TI, weight_OI, bias_O, output_TO).run()
        return output_TO

    def bind(
        self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor, output_TO: Tensor
    ) -> KernelCall:
        """Return a call that writes the product of contiguous float32 `input_TI` to `output_TO`."""
        outputs, inputs = weight_OI.shape
        return self.functions[len(input_TI) - 1].bind(
            weight_OI.data_ptr(),
            input_TI.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            inputs,
            outputs,
            threads=torch.get_num_threads(),
        )


def load_gemv(dtype: torch.dtype) -> Gemv | None:
    """Return the products of a dtype; None if it is unsupported or cannot be compiled."""
    if dtype not in DTYPE_NAMES:
        return None
    wanted = [("product", DTYPE_NAMES[dtype], tokens) for tokens in range(1, GEMV_MAX_TOKENS + 1)]
    products = compile_functions(*wanted)
    return None if products is None else Gemv(products)


def supports_gemv(weight_OI: Tensor) -> bool:
    """Whether the products support a weight's shape, layout and device.

    Its rows must be whole cache lines.
    """
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.is_contiguous()
        and len(weight_OI) >= GEMV_MIN_OUTPUTS
        and weight_OI.shape[1] * weight_OI.itemsize % CACHE_LINE_BYTES == 0
    )


TILE_TOKENS = 16
AMX_MAX_TOKENS = 2 * TILE_TOKENS
AMX_MIN_OUTPUTS = 32
"""Rows of weights that are read at a time."""


@dataclass(frozen=True)
class AmxMatmul:
    """AMX product x [T, I] -> x W^T + b [T, O] for up to `AMX_MAX_TOKENS` tokens."""

    functions: list[NativeFunction]
    """For one tile of tokens, and for two."""

    def __call__(self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        """Return the product [T, O] with a weight that `supports_amx`.

        All are bfloat16, except `bias_O` in float32. Sums are float32, rounded once.
        """
        scratch = torch.empty(count_scratch_items(*input_TI.shape), dtype=torch.int32)
        output_TO = torch.empty(len(input_TI), len(weight_OI), dtype=weight_OI.dtype)
        for call in self.bind_calls(input_TI.contiguous(), scratch, weight_OI, bias_O, output_TO):
            call()
        return output_TO

    def bind_calls(
        self,
        input_TI: Tensor,
        pairs_scratch: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor,
        output_TO: Tensor,
    ) -> list[Callable[[], object]]:
        """Return calls that write the product of the contents of `input_TI` to `output_TO`.

        `pairs_scratch`: int32 scratch memory of `count_scratch_items(T, I)` items. All tensors are
        contiguous, and the caller keeps them alive.
        """
        tokens, (outputs, inputs) = len(input_TI), weight_OI.shape
        wide = _count_token_tiles(tokens)
        # Transposed to pairs of inputs, as AMX multiplies them. Unused columns yield sums that are
        # discarded.
        pairs = pairs_scratch.view(inputs // 2, TILE_TOKENS * wide)[:, :tokens]
        job = self.functions[wide - 1].bind(
            weight_OI.data_ptr(),
            pairs_scratch.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            inputs,
            outputs,
            tokens,
            threads=torch.get_num_threads(),
        )
        return [partial(pairs.copy_, input_TI.view(torch.int32).t()), job.run]


def count_scratch_items(tokens: int, inputs: int) -> int:
    return inputs // 2 * TILE_TOKENS * _count_token_tiles(tokens)


def load_amx_matmul(dtype: torch.dtype) -> AmxMatmul | None:
    """Return the AMX products of a dtype; None where AMX does not support it or is missing."""
    cpu: Any = torch.cpu
    # Linux grants the use of tiles per process.
    if dtype != torch.bfloat16 or not cpu._is_amx_tile_supported() or not cpu._init_amx():
        return None
    products = compile_functions(("tiles", "bfloat16", 1), ("tiles", "bfloat16", 2))
    return None if products is None else AmxMatmul(products)


def supports_amx(weight_OI: Tensor) -> bool:
    """Whether the products support a weight's shape, layout and device."""
    return supports_gemv(weight_OI) and len(weight_OI) >= AMX_MIN_OUTPUTS


def _count_token_tiles(tokens: int) -> int:
    return -(-tokens // TILE_TOKENS)


_ONEDNN_CACHE_ENTRIES = 128
"""Entries in each of oneDNN's two caches of compiled products, one per layer shape and number of
tokens. The default of 1,024 came to 650 MiB for a tiny model after 500 lengths. 128 hold about 32
lengths; recompiling is negligible beside a prefill."""

for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # oneDNN reads these at the first product.
    os.environ.setdefault(_name, str(_ONEDNN_CACHE_ENTRIES))

KernelLaunch = Callable[[], object]
ScratchAllocator = Callable[[int, torch.dtype], Tensor]
"""Allocator of contiguous scratch memory: number of items, dtype."""

TORCH_GEMV_MAX_TOKENS = 3
TRANSPOSED_MAX_TOKENS = {torch.float32: 64, torch.bfloat16: 256}
"""Tokens from which transposing the result costs more than the other order saves."""


class FastLinear(nn.Linear):
    """Linear layer `x [..., I] -> x W^T + b [..., O]`; `x` has the dtype of the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        """Shares the parameters of `linear`."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self._parameters.update(linear._parameters)
        weight = linear.weight
        self._gemv = load_gemv(weight.dtype) if supports_gemv(weight) else None
        self._amx_matmul: AmxMatmul | None = None
        self._gemv_max_tokens = TORCH_GEMV_MAX_TOKENS
        """Maximum number of tokens for matrix-vector products."""
        if self._gemv is not None:
            self._amx_matmul = load_amx_matmul(weight.dtype) if supports_amx(weight) else None
            # AMX also for one token: its bits must not depend on the batch size.
            self._gemv_max_tokens = GEMV_MAX_TOKENS if self._amx_matmul is None else 0
        # Other dtypes and devices: torch's order is as good.
        self._transposed_max_tokens = (
            TRANSPOSED_MAX_TOKENS.get(weight.dtype, 0) if weight.device.type == "cpu" else 0
        )
        self._zeros_O = torch.zeros(0 if self._gemv is None else len(weight), dtype=torch.float32)
        self._float32_bias_O: Tensor | None = None
        self._dtype = weight.dtype

    def forward(self, input: Tensor) -> Tensor:
        """torch's own forward runs with gradients, and for invalid inputs to raise its errors."""
        tokens = input.numel() // self.in_features
        if (
            not 0 < tokens < self._transposed_max_tokens
            or torch.is_grad_enabled()
            or input.shape[-1] != self.in_features
            or not input.dtype == self.weight.dtype == self._dtype
        ):
            return super().forward(input)
        if tokens > self._gemv_max_tokens:
            input_TI = input.reshape(tokens, -1)
            if self._amx_matmul is not None and tokens <= AMX_MAX_TOKENS:
                output_TO = self._amx_matmul(input_TI, self.weight, self._float32_bias())
            else:
                output_TO = self._transposed_product(input_TI)
        elif self._gemv is not None:
            output_TO = self._gemv(input.reshape(tokens, -1), self.weight, self._float32_bias())
        else:
            return super().forward(input)
        return output_TO.view(*input.shape[:-1], -1)

    def bind_into(
        self, input_TI: Tensor, allocate_scratch: ScratchAllocator, output_TO: Tensor
    ) -> list[KernelLaunch] | None:
        """Return calls that write the product of the contents of `input_TI` to `output_TO`.

        None if torch computes products of so many tokens. Tensors must be contiguous; the caller
        keeps them, the allocated scratch memory and the parameters alive.
        """
        tokens = len(input_TI)
        if self._gemv is None or self.weight.dtype != self._dtype:
            return None
        weight, bias_O = self.weight, self._float32_bias()
        if tokens > self._gemv_max_tokens:
            if self._amx_matmul is None or tokens > AMX_MAX_TOKENS:
                return None
            turned = allocate_scratch(count_scratch_items(tokens, self.in_features), torch.int32)
            return self._amx_matmul.bind_calls(input_TI, turned, weight, bias_O, output_TO)
        if input_TI.dtype == torch.float32:
            return [self._gemv.bind(input_TI, weight, bias_O, output_TO).run]
        wide_TI = allocate_scratch(input_TI.numel(), torch.float32).view(input_TI.shape)
        job = self._gemv.bind(wide_TI, weight, bias_O, output_TO)
        return [partial(wide_TI.copy_, input_TI), job.run]

    def _float32_bias(self) -> Tensor:
        """The bias in float32, at an address that does not change."""
        bias_O: Tensor | None = self.bias
        if bias_O is None:
            return self._zeros_O
        if bias_O.dtype == torch.float32:
            return bias_O
        if self._float32_bias_O is None:
            self._float32_bias_O = bias_O.float()
        return self._float32_bias_O

    def _transposed_product(self, input_TI: Tensor) -> Tensor:
        bias_O: Tensor | None = self.bias
        if bias_O is None:
            output_OT = torch.mm(self.weight, input_TI.t())
        else:
            output_OT = torch.addmm(bias_O.unsqueeze(1), self.weight, input_TI.t())
        return output_OT.t().contiguous()


def iterate_modules(root: nn.Module) -> Iterator[nn.Module]:
    """`root.modules()` without making their names, which a shard's blocks do not have."""
    yield root
    children: dict[str, nn.Module | None] = root._modules
    for child in children.values():
        if child is not None:
            yield from iterate_modules(child)


def replace_linear_layers(root: nn.Module) -> None:
    """Replace the linear layers below `root` by `FastLinear`, in place.

    At most one layer's weight is in memory twice.
    """
    for parent in list(iterate_modules(root)):
        children: dict[str, Any] = parent._modules
        for name, child in children.items():
            if isinstance(child, Conv1D):
                child = make_linear(copy_to_huge_pages(child.weight.t()), child.bias)
            if type(child) is nn.Linear:
                setattr(parent, name, FastLinear(child))
    trim_malloc_heap()


def make_linear(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    """Return torch's linear layer with these parameters, which are not copied."""
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias_O is not None:
        linear.bias = nn.Parameter(bias_O, requires_grad=False)
    return linear


_malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim_malloc_heap() -> None:
    """Return freed memory to the system, since new weights do not fit into the gaps of old ones.

    Does nothing without glibc.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
