"""How OpenMP's threads wait for work. It is read when torch is loaded, so this comes before."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = 20_000
"""Turns that a thread of GNU's OpenMP spins before it sleeps: tenths of a millisecond, in which a
step comes to its next product. GNU's own 300,000 keep a core from other processes for milliseconds
after every step. With none each product wakes threads, which takes as long as the product."""
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let idle threads of this process, and of its children, sleep soon; a user's setting stays."""
    if not any(name in environment for name in _WAITING):
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
