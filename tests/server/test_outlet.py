from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nesa_node.compression import tensors
from nesa_node.core.errors import ProtocolError
from nesa_node.server.outlet import Outlet
from nesa_node.swarm.messages import Mode, RowSlice
from nesa_node.swarm.outbox import Kept

HIDDEN = 8


async def _no_dial(*_: object) -> Any:
    raise AssertionError("this session sends to its client")


def outlet_of(mode: Mode) -> Outlet:
    opened: Any = SimpleNamespace(
        session=b"s" * 16, dtype="float32", rows=1, max_tokens=16, mode=mode
    )
    return Outlet(cast(Any, None), cast(Any, None), opened, HIDDEN, _no_dial)


def kept(number: int, position: int, count: int) -> Kept:
    meta, payload = tensors.encode(torch.randn(count, HIDDEN))
    return Kept(number, (RowSlice(0, position, count),), "all", meta, memoryview(payload))


def test_a_star_has_no_room_for_what_a_donor_kept() -> None:
    outlet = outlet_of("star")
    with pytest.raises(ProtocolError, match="keep no outputs"):
        outlet.keep(kept(0, 0, 5))
    assert not list(outlet.kept([0], [16]))


def test_a_rollback_cuts_what_is_kept_for_the_next_node() -> None:
    """A replacement would be sent outputs of tokens that the session no longer has."""
    outlet = outlet_of("chain")
    for number, (position, count) in enumerate([(0, 5), (5, 1), (6, 1)]):
        outlet.keep(kept(number, position, count))
    outlet.truncate([3])
    left = [part for step in outlet.kept([0], [16]) for part in step.rows]
    assert left == [RowSlice(0, 0, 3)]
