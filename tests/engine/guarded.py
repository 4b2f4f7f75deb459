"""Tensors beside which there is no memory."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from nesa_node.engine.kernels.machine_code import get_mapping_address

PAGE = mmap.PAGESIZE


def guarded(tensor: Tensor) -> Tensor:
    """A copy that ends where no memory is."""
    pages = -(-tensor.nbytes // PAGE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, (pages + 2) * PAGE, flags=flags)
    first = get_mapping_address(memory)
    for start in (first, first + (pages + 1) * PAGE):
        nothing = ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(PAGE), 0)
        assert nothing == 0
    offset = (pages + 1) * PAGE - tensor.nbytes
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.view(tensor.shape).copy_(tensor)
