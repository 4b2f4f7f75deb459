from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nesa_node.engine.weights.skeleton import Skeleton
from tests.engine.chained import open_local


def test_models_that_threads_open_at_once_leave_torch_as_it_was(
    tiny: Callable[[str], Path],
) -> None:
    checkpoint = open_local(tiny("llama"))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Skeleton, [checkpoint] * 12))
    weight = torch.full((4, 4), 7.0)
    torch.nn.init.zeros_(weight)
    assert not weight.any()
