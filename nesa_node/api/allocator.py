"""Settings of glibc's allocator for a process with many threads."""

from __future__ import annotations

import ctypes
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ARENAS = 2
_MAPPED_BYTES = 1 << 20
_SPARE_BYTES = 8 << 20
_mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)


def share_memory() -> None:
    """Limit malloc's arenas, so that threads reuse each other's memory. Call before threads start.

    Without effect unless the C library is glibc. By default glibc has eight arenas per core, and
    each keeps the memory of its thread's logits: hundreds of MiB that no other request can use.
    glibc also raises its mmap threshold, up to 32 MiB, when a mapped block is freed; large blocks
    then come from arenas, where small blocks fragment them. A fixed threshold keeps large blocks
    mapped, so that freeing returns them to the system.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, _ARENAS)
        _mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        # A fixed mmap threshold would otherwise return and refault the memory of each request.
        _mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)
