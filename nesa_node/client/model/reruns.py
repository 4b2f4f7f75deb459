"""Computing again what an audit found to be wrong, as long as it was not shown to the caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import torch

from nesa_node.core.errors import WrongActivationsError
from nesa_node.core.logging import get_logger

log = get_logger(__name__)

T = TypeVar("T")

MAX_RERUNS = 3
"""Each leaves a node out. Where so many lie, the caller is to know."""


def run_until_right(run: Callable[[], T]) -> T:
    """What `run` returns; called again where it raises `WrongActivationsError`, but not for ever.

    The random numbers of PyTorch that `run` draws are the same each time.
    """
    state, on_gpus = torch.get_rng_state(), torch.cuda.get_rng_state_all()
    for _ in range(MAX_RERUNS):
        try:
            return run()
        except WrongActivationsError as error:
            log.warning("running_again", reason=str(error))
        torch.set_rng_state(state)
        torch.cuda.set_rng_state_all(on_gpus)
    return run()


async def await_until_right(run: Callable[[], Awaitable[T]]) -> T:
    """See `run_until_right`; random numbers differ each time, unless `run` seeds them."""
    for _ in range(MAX_RERUNS):
        try:
            return await run()
        except WrongActivationsError as error:
            log.warning("running_again", reason=str(error))
    return await run()
