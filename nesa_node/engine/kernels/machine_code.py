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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nesa_node.core.logging import get_logger

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
    return torch.cat(
        list(tensors), out=allocate_in_huge_pages((rows, *first.shape[1:]), first.dtype)
    )


def get_mapping_address(memory: mmap.mmap) -> int:
    """Return the start address of mapped memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


log = get_logger(__name__)

COMPILE_TIMEOUT_S = 60
CACHE_LINE_BYTES = 64
"""Bytes of a cache line."""
_COMPILER_MODULE = "nesa_node.engine.kernels.native.compiler"
_READ_AND_RUN = 1 | 4  # PROT_READ | PROT_EXEC

_SINGLE_THREADED = (0, 0)
_compile_lock = threading.Lock()

FunctionSpec = tuple[str | int, ...]
"""Function of `native/compiler.py` and its arguments (a dtype's name, sizes)."""


class _ExecutableMemory:
    """Executable memory with machine code and its constants."""

    def __init__(self, constants: bytes, codes: Sequence[bytes]) -> None:
        """Raises `OSError` if this process may not execute it."""
        self._constants = ctypes.create_string_buffer(constants, len(constants))
        self.constants_address = ctypes.addressof(self._constants)
        size = sum(_round_up_to_cache_lines(code) for code in codes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, size, flags=flags)
        base, start = get_mapping_address(self._memory), 0
        self.addresses: list[int] = []
        for code in codes:
            self._memory[start : start + len(code)] = code
            self.addresses.append(base + start)
            start += _round_up_to_cache_lines(code)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(size), _READ_AND_RUN):
            raise OSError(ctypes.get_errno(), "this process may not execute memory that it wrote")


class NativeFunction:
    """A function in machine code. The caller keeps alive what its pointer fields refer to."""

    def __init__(self, memory: _ExecutableMemory, address: int) -> None:
        self._memory, self._address = memory, address
        self._openmp = _OpenMP.load_from_torch()
        self._callable = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __deepcopy__(self, _: object) -> NativeFunction:
        return self

    def __call__(self, *fields: int, threads: int = 1) -> None:
        """Run it on `threads` of torch's threads; 1 is the calling thread alone."""
        self.bind(*fields, threads=threads).run()

    def bind(self, *fields: int, threads: int = 1) -> KernelCall:
        """Return a reusable call with these fields."""
        openmp = self._openmp if threads > 1 else None
        asks = _SINGLE_THREADED if openmp is None else openmp.thread_query_addresses
        job = KernelCall((*asks, self._memory.constants_address), fields)
        # `run` refers to the job, so that keeping `run` keeps the fields alive.
        if openmp is None:
            job.run = partial(self._callable, job.pointer)
        else:
            job.run = partial(openmp.run_parallel, self._address, job.pointer, threads)
        return job


class KernelCall:
    """Fields of one function call at a fixed address. The caller keeps alive what they point to.

    `run` is set by `NativeFunction.bind`.
    """

    __slots__ = ("_fields", "_num_header_fields", "pointer", "run")

    def __init__(self, header: Sequence[int], fields: Sequence[int]) -> None:
        """`own`: header fields, which every function begins with."""
        self._num_header_fields = len(header)
        self._fields = (ctypes.c_int64 * (self._num_header_fields + len(fields)))(*header, *fields)
        self.pointer: Any = ctypes.byref(self._fields)
        self.run: Callable[[], object]

    def set_field(self, index: int, value: int) -> None:
        """Replace field `index` of those given to `NativeFunction.bind`."""
        self._fields[self._num_header_fields + index] = value


class _OpenMP:
    """OpenMP runtime of torch; machine code runs on its threads."""

    def __init__(self, library: Any) -> None:
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self.set_num_threads = library.omp_set_num_threads
        self.set_num_threads.argtypes = (ctypes.c_int,)
        self.set_num_threads.restype = None
        self.thread_query_addresses: Sequence[int] = [
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in (library.omp_get_thread_num, library.omp_get_num_threads)
        ]

    @classmethod
    @functools.cache
    def load_from_torch(cls) -> _OpenMP | None:
        """Return torch's runtime; None if it is not GNU's."""
        library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
        try:
            return cls(ctypes.CDLL(str(library)))
        except (OSError, AttributeError):
            return None

    def run_parallel(self, function: int, job: Any, threads: int) -> None:
        self._parallel(function, job, threads, 0)


def set_num_threads(count: int) -> None:
    """Set the number of torch's threads for the calling thread only."""
    openmp = _OpenMP.load_from_torch()
    # torch's own call would also set it for threads started later.
    (torch.set_num_threads if openmp is None else openmp.set_num_threads)(count)


def compile_functions(*specs: FunctionSpec) -> list[NativeFunction] | None:
    """Compile functions for this processor; None, with a warning, where that fails."""
    with _compile_lock:
        return _compile_functions(*specs)


@functools.cache
def _compile_functions(*specs: FunctionSpec) -> list[NativeFunction] | None:
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
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_python_path())},
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


def _python_path() -> list[str]:
    given = os.environ.get("PYTHONPATH")
    return [str(Path(__file__).parents[3]), *([given] if given else [])]


def load_functions(constants: bytes, codes: Sequence[bytes]) -> list[NativeFunction]:
    """Load code compiled by `native/compiler.py`. Raises `OSError` if it may not be executed."""
    memory = _ExecutableMemory(constants, codes)
    return [NativeFunction(memory, address) for address in memory.addresses]


def _round_up_to_cache_lines(code: bytes) -> int:
    return -(-len(code) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
