from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from nesa_node.compression import tensors
from nesa_node.server.outlet import Outlet
from nesa_node.swarm.messages import RowSlice
from nesa_node.swarm.outbox import Kept

HIDDEN = 8


async def _no_dial(*_: object) -> Any:
    raise AssertionError("this session sends to its client")


def test_a_rollback_cuts_what_is_kept_for_the_next_node() -> None:
    """A replacement would be sent outputs of tokens that the session no longer has."""
    opened: Any = SimpleNamespace(
        session=b"s" * 16, dtype="float32", rows=1, max_tokens=16, mode="chain"
    )
    outlet = Outlet(cast(Any, None), cast(Any, None), opened, HIDDEN, _no_dial)
    for number, (position, count) in enumerate([(0, 5), (5, 1), (6, 1)]):
        meta, payload = tensors.encode(torch.randn(count, HIDDEN))
        rows = (RowSlice(0, position, count),)
        outlet.keep(Kept(number, rows, "all", meta, memoryview(payload)))
    outlet.truncate([3])
    left = [part for kept in outlet.kept([0], [16]) for part in kept.rows]
    assert left == [RowSlice(0, 0, 3)]
