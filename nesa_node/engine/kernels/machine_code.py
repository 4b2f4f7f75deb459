"""Compilation of machine-code functions for this processor (`native/`), and their calls.

Tensors in huge pages: one core reads weights 1.1 to 1.2 x as fast as from pages of 4 KiB.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nesa_node.core.logging import get_logger

log = get_logger(__name__)

HUGE_PAGE_BYTES = 2 << 20
MIN_MAPPED_BYTES = 128 << 10
"""Larger tensors get a mapping of their own, which returns to the system once they are freed.

malloc would take them from an arena of the loading thread and reuse it after frees: the peak of a
span of 411 MiB was 630 MiB."""


def allocate_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized CPU tensor, in huge pages as far as it fills them."""
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if size < MIN_MAPPED_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -get_mapping_address(memory) % HUGE_PAGE_BYTES
    # The rest after the last whole huge page uses small pages, so that no memory is wasted.
    if whole := size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def copy_to_huge_pages(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor in huge pages.

    It is a copy, unless the tensor is small, not on the CPU, or in huge pages already.
    """
    if tensor.nbytes < HUGE_PAGE_BYTES or tensor.device.type != "cpu":
        return tensor.contiguous()
    if tensor.is_contiguous() and tensor.data_ptr() % HUGE_PAGE_BYTES == 0:
        return tensor
    return allocate_in_huge_pages(tensor.shape, tensor.dtype).copy_(tensor)


def concatenate_in_huge_pages(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension, into huge pages on the CPU."""
    first = tensors[0]
    if first.device.type != "cpu":
        return torch.cat(list(tensors))
    rows = sum(len(tensor) for tensor in tensors)
    joined = allocate_in_huge_pages((rows, *first.shape[1:]), first.dtype)
    return torch.cat(list(tensors), out=joined)


def get_mapping_address(memory: mmap.mmap) -> int:
    """Return the start address of mapped memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


COMPILE_TIMEOUT_S = 60
CACHE_LINE_BYTES = 64
NUM_HEADER_FIELDS = 3
"""Fields that every function begins with (`native/job_builder.py`)."""
_COMPILER_MODULE = "nesa_node.engine.kernels.native.compiler"
_READ_AND_RUN = 1 | 4  # PROT_READ | PROT_EXEC

_compile_lock = threading.Lock()

FunctionSpec = tuple[str | int, ...]
"""Function of `native/compiler.py` and its arguments (a dtype's name, sizes)."""


class _ExecutableMemory:
    """Executable memory with machine code and its constants."""

    def __init__(self, constants: bytes, codes: Sequence[bytes]) -> None:
        """Raises `OSError` if this process may not execute it."""
        self._constants = ctypes.create_string_buffer(constants, len(constants))
        self.constants_address = ctypes.addressof(self._constants)
        # Each function begins at a cache line.
        starts = [0]
        for code in codes:
            lines = -(-len(code) // CACHE_LINE_BYTES)
            starts.append(starts[-1] + lines * CACHE_LINE_BYTES)
        size = starts.pop()
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = get_mapping_address(self._memory)
        self.addresses = [base + start for start in starts]
        for start, code in zip(starts, codes, strict=True):
            self._memory[start : start + len(code)] = code
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(size), _READ_AND_RUN):
            raise OSError(ctypes.get_errno(), "this process may not execute memory that it wrote")


class NativeFunction:
    """A function in machine code. The caller keeps alive what its pointer fields refer to."""

    def __init__(self, memory: _ExecutableMemory, address: int) -> None:
        self._memory, self._address = memory, address
        self._callable = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __deepcopy__(self, _: object) -> NativeFunction:
        return self

    def __call__(self, *fields: int, threads: int = 1) -> None:
        """Run it on `threads` of torch's threads; 1 is the calling thread alone."""
        self.bind(*fields, threads=threads).run()

    def bind(self, *fields: int, threads: int = 1) -> KernelCall:
        """Return a reusable call with these fields."""
        openmp = _load_openmp() if threads > 1 else None
        queries = (0, 0) if openmp is None else _thread_query_addresses()
        header = *queries, self._memory.constants_address
        memory = (ctypes.c_int64 * (NUM_HEADER_FIELDS + len(fields)))(*header, *fields)
        # `run` refers to the fields, so that keeping `run` keeps them alive.
        pointer: Any = ctypes.byref(memory)
        if openmp is None:
            return KernelCall(memory, partial(self._callable, pointer))
        run = partial(openmp.GOMP_parallel, self._address, pointer, threads, 0)
        return KernelCall(memory, run)


@dataclass(slots=True)
class KernelCall:
    """Fields of one function call at a fixed address. The caller keeps alive what they point to."""

    fields: Any
    """Header fields, then those given to `NativeFunction.bind`: an array of ctypes."""
    run: Callable[[], object]

    def set_field(self, index: int, value: int) -> None:
        """Replace field `index` of those given to `NativeFunction.bind`."""
        self.fields[NUM_HEADER_FIELDS + index] = value


@functools.cache
def _load_openmp() -> Any:
    """Return torch's OpenMP runtime, on whose threads machine code runs; None if not GNU's."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        library.GOMP_parallel.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint,
            ctypes.c_uint,
        )
        library.GOMP_parallel.restype = None
        library.omp_set_num_threads.argtypes = (ctypes.c_int,)
        library.omp_set_num_threads.restype = None
    except (OSError, AttributeError):
        return None
    return library


@functools.cache
def _thread_query_addresses() -> tuple[int, ...]:
    openmp = _load_openmp()
    queries = openmp.omp_get_thread_num, openmp.omp_get_num_threads
    return tuple(ctypes.cast(query, ctypes.c_void_p).value or 0 for query in queries)


def set_num_threads(count: int) -> None:
    """Set the number of torch's threads for the calling thread only."""
    openmp = _load_openmp()
    # torch's own call would also set it for threads started later.
    (torch.set_num_threads if openmp is None else openmp.omp_set_num_threads)(count)


def compile_functions(*specs: FunctionSpec) -> list[NativeFunction] | None:
    """Compile functions for this processor; None, with a warning, where that fails."""
    with _compile_lock:
        return _compile_functions(*specs)


@functools.cache
def _compile_functions(*specs: FunctionSpec) -> list[NativeFunction] | None:
    path = str(Path(__file__).parents[3])
    if given := os.environ.get("PYTHONPATH"):
        path += os.pathsep + given
    try:
        if sys.platform != "linux":
            raise OSError(f"not supported on {sys.platform}")
        finished = subprocess.run(
            [sys.executable, "-P", "-m", _COMPILER_MODULE],
            input=json.dumps(specs).encode(),
            capture_output=True,
            timeout=COMPILE_TIMEOUT_S,
            check=True,
            # The child must import this copy of the package, even if there are several.
            env={**os.environ, "PYTHONPATH": path},
        )
        constants, *codes = (base64.b64decode(code) for code in json.loads(finished.stdout))
        if len(codes) != len(specs):
            raise ValueError(f"expected {len(specs)} functions, got {len(codes)}")
        return load_functions(constants, codes)
    except subprocess.CalledProcessError as error:
        shown = error.stderr.decode(errors="replace").strip()
        reason = f"{error.returncode}: {shown[-200:]}"
    except (subprocess.TimeoutExpired, OSError, ValueError, TypeError) as error:
        reason = str(error)[:200]
    # Callers fall back to torch.
    log.warning("native_compilation_failed", wanted=specs[0], error=reason)
    return None


def load_functions(constants: bytes, codes: Sequence[bytes]) -> list[NativeFunction]:
    """Load code compiled by `native/compiler.py`. Raises `OSError` if it may not be executed."""
    memory = _ExecutableMemory(constants, codes)
    return [NativeFunction(memory, address) for address in memory.addresses]
