"""Memory that many threads use, one after another."""

from __future__ import annotations

import ctypes
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ARENAS = 2
_MAPPED_BYTES = 1 << 20
_SPARE_BYTES = 8 << 20
_mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)


def share_memory() -> None:
    """Let memory that one request took be had by the next, before threads begin; for glibc only.

    It gives each thread one of eight arenas per core, and each keeps what its thread's logits took:
    hundreds of MiB that no other request gets. A few arenas are enough. And of a block that is
    freed it learns to take such blocks, up to 32 MiB, from arenas, where small ones that stay soon
    lie between them: what was computed for many requests at once is mapped, and given back.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, _ARENAS)
        _mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        # Without this it would now give back, and take again, what each single request needs.
        _mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)
