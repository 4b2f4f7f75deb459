"""Products of a few tokens, in machine code made for this processor.

Decoding reads every weight for each token: a product of few tokens takes as long as its weight
takes to come from memory. These read it in its own order and prefetch far ahead. A token's result
has the same bits whatever it is batched with.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nesa_node.core.logging import get_logger
from nesa_node.engine import huge_pages

log = get_logger(__name__)

MOST_TOKENS = 8
LEAST_OUTPUTS = 2
LINE = 64
"""Bytes of a cache line. A row of weights must be whole ones."""
COMPILE_S = 60
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_COMPILER = Path(__file__).with_name("gemv_compiler.py")
_READ_AND_RUN = 1 | 4  # PROT_READ | PROT_EXEC


class Job(ctypes.Structure):
    """What a product is given; `gemv_compiler.JOB` says what each is."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("input", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("thread", ctypes.c_void_p),
        ("threads", ctypes.c_void_p),
    )


class Gemv:
    """x [T, I] -> x W^T + b [T, O] for up to `MOST_TOKENS` tokens of one dtype."""

    def __init__(self, codes: list[bytes]) -> None:
        """`codes`: those for one token, for two, ...

        Raises `OSError` if it may not run them, `ValueError` if they are not as many as they must.
        """
        if len(codes) != MOST_TOKENS:
            raise ValueError(f"expected {MOST_TOKENS} products, got {len(codes)}")
        self._openmp = _OpenMP.of_torch()
        self._code = mmap.mmap(
            -1,
            sum(_whole_lines(code) for code in codes),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        base, start, addresses = huge_pages.address(self._code), 0, []
        for code in codes:
            self._code[start : start + len(code)] = code
            addresses.append(base + start)
            start += _whole_lines(code)
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(len(self._code))
        if libc.mprotect(ctypes.c_void_p(base), size, _READ_AND_RUN):
            raise OSError(ctypes.get_errno(), "this process may not run code that it made")
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._products = [(address, kind(address)) for address in addresses]

    def __call__(self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        """Return the product [T, O] in the dtype of `weight_OI`, which `fits`.

        `input_TI` is of that dtype, `bias_O` float32 and contiguous. Summed in float32 and
        rounded once. Runs on torch's threads.
        """
        input_TI = input_TI.float().contiguous()
        tokens = len(input_TI)
        output_TO = torch.empty(tokens, len(weight_OI), dtype=weight_OI.dtype)
        job = Job(
            weight_OI.data_ptr(),
            input_TI.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            weight_OI.shape[1],
            len(weight_OI),
        )
        address, product = self._products[tokens - 1]
        threads = torch.get_num_threads()
        if threads > 1 and self._openmp is not None:
            self._openmp.run(address, job, threads)
        else:
            product(ctypes.addressof(job))
        return output_TO


class _OpenMP:
    """The threads that torch computes with."""

    def __init__(self, library: Any) -> None:
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self._thread, self._threads = (
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (library.omp_get_thread_num, library.omp_get_num_threads)
        )

    @classmethod
    def of_torch(cls) -> _OpenMP | None:
        """None where torch brings no GNU OpenMP."""
        folder = Path(torch.__file__).with_name("lib")
        for path in folder.glob("libgomp*.so*"):
            return cls(ctypes.CDLL(str(path)))
        return None

    def run(self, product: int, job: Job, threads: int) -> None:
        job.thread, job.threads = self._thread, self._threads
        self._parallel(product, ctypes.addressof(job), threads, 0)


@functools.cache
def gemv(dtype: torch.dtype) -> Gemv | None:
    """Compile the products of a dtype; None if it has none, or where they cannot be had."""
    if dtype not in _NAMES:
        return None
    try:
        finished = subprocess.run(
            [sys.executable, "-P", str(_COMPILER), _NAMES[dtype]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMPILE_S,
            check=True,
        )
        return Gemv([base64.b64decode(code) for code in json.loads(finished.stdout)])
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace")[-200:]
    except (subprocess.TimeoutExpired, OSError, ValueError, TypeError) as error:
        reason = str(error)[:200]
    # torch's products serve as well.
    log.warning("products_not_compiled", dtype=_NAMES[dtype], error=reason)
    return None


def fits(weight_OI: Tensor) -> bool:
    """Whether a weight has the shape, the layout and the place that products need."""
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.is_contiguous()
        and len(weight_OI) >= LEAST_OUTPUTS
        and weight_OI.shape[1] * weight_OI.itemsize % LINE == 0
    )


def _whole_lines(code: bytes) -> int:
    return -(-len(code) // LINE) * LINE
