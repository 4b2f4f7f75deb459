"""Spin time of idle OpenMP threads. Must be set before torch is imported, which reads it."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = 20_000
"""Iterations that an idle thread of GNU OpenMP spins before it sleeps, tenths of a millisecond: the
time between two matrix products of a step. GNU's default of 300,000 occupies a core for
milliseconds after each step; with 0 each product wakes threads, which takes as long as the product.
"""
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Shorten the spinning of idle threads here and in child processes, unless the user set it."""
    if not any(name in environment for name in _WAITING):
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
