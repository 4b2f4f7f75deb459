"""Steps are applied once, in order, and nothing refused leaves a trace."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nesa_node.compression import tensors
from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId, Span
from nesa_node.server.scheduler.session_queue import SessionQueue
from nesa_node.server.session.sealing import SessionSealer
from nesa_node.server.session.session_state import SessionState, StepSequencer, decode_step
from nesa_node.swarm.protocol.messages import VERSION, Computation, RowSlice, Step

SESSION = b"s" * 16
HIDDEN = 8


MOST = 20


class Inbox(StepSequencer):
    """That of a session of 16 tokens a row, with room for `MOST`, whose steps wait in its queue."""

    def __init__(self, rows: int) -> None:
        tables: Any = [SimpleNamespace(length=0, reuse_prefix=lambda _: None) for _ in range(rows)]
        blocks: Any = SimpleNamespace(hidden_size=HIDDEN, span=Span(0, 1))
        opened: Any = SimpleNamespace(
            session=SESSION,
            rows=rows,
            max_tokens=16,
            dtype="float32",
            quality="exact",
            epoch=0,
            donor=None,
            version=VERSION,
            secret=b"k" * 32,
            prefix=(),
            blocks=(0, 1),
        )
        client = PeerId("client")
        queue = SessionQueue(tables, blocks, client=client, priority=0, dtype=torch.float32)
        limits: Any = SimpleNamespace(trusted=())
        self.state = SessionState(
            opened,
            client,
            queue,
            cast(Any, None),
            limits,
            SessionSealer(cast(Any, None), opened, Computation("float32", "none", "cpu")),
        )
        super().__init__(self.state, self._outgrow)

    def accept(self, step: Step, content: Any) -> bool:
        accepted = super().accept(step, content)
        if accepted:
            self.state.queue.append(step, asyncio.run(decode_step(step, content)))
        return accepted

    @property
    def expected_positions(self) -> list[int]:
        return list(self.state.expected_positions)

    @staticmethod
    def _outgrow(have: int, want: int) -> None:
        assert 16 <= have < want
        if want > MOST:
            raise ProtocolError("cache_full", f"{want} tokens")


def inbox(rows: int = 2) -> Inbox:
    made = Inbox(rows)
    made.state.begin_epoch(1, [0] * rows)
    return made


def accept(box: Inbox, message: Step, payload: bytearray) -> bool:
    if not box.needs_decoding(message, payload):
        return False
    asyncio.run(decode_step(message, payload))
    return box.accept(message, payload)


def step(
    number: int,
    rows: list[tuple[int, int, int]],
    *,
    epoch: int = 1,
    session: bytes = SESSION,
    value: float = 1.0,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Step, bytearray]:
    total = sum(count for _, _, count in rows)
    meta, payload = tensors.encode(torch.full(shape or (total, HIDDEN), value, dtype=dtype))
    message = Step(
        session=session,
        epoch=epoch,
        step=number,
        rows=tuple(RowSlice(*part) for part in rows),
        tensor=meta,
    )
    return message, bytearray(payload)


def test_steps_follow_one_another_row_by_row() -> None:
    box = inbox()
    for number, rows in enumerate([[(0, 0, 3), (1, 0, 2)], [(0, 3, 1)], [(1, 2, 4)]]):
        assert accept(box, *step(number, rows))
    assert box.expected_positions == [4, 6]
    assert box.last_step == 2


def test_a_row_grows_beyond_its_promise_while_there_is_room() -> None:
    box = inbox()
    assert accept(box, *step(1, [(0, 0, 16)]))
    assert accept(box, *step(2, [(0, 16, 4)]))
    with pytest.raises(ProtocolError) as refused:
        accept(box, *step(3, [(0, 20, 1)]))
    assert refused.value.code == "cache_full"
    assert box.expected_positions == [20, 0]
    box.state.begin_epoch(2, [10, 0])
    assert accept(box, *step(3, [(0, 10, 10)], epoch=2))


def test_a_step_of_an_older_epoch_is_not_examined_whatever_it_holds() -> None:
    box = inbox()
    box.state.begin_epoch(2, [0, 0])
    for bad in (step(1, [(0, 0, 2)]), step(1, [(0, 0, 2)], shape=(3, HIDDEN))):
        assert not box.needs_decoding(*bad)


def test_a_step_whose_epoch_ended_while_it_was_examined_is_dropped() -> None:
    box = inbox()
    message, payload = step(1, [(0, 0, 2)])
    assert box.needs_decoding(message, payload)
    box.state.begin_epoch(2, [0, 0])
    assert not box.accept(message, payload)
    assert box.expected_positions == [0, 0]


def test_a_repeated_step_is_applied_once_and_with_other_bytes_refused() -> None:
    box = inbox()
    assert accept(box, *step(5, [(0, 0, 2)]))
    assert not accept(box, *step(5, [(0, 0, 2)]))
    with pytest.raises(ProtocolError, match="other bytes") as refused:
        accept(box, *step(5, [(0, 0, 2)], value=2.0))
    assert refused.value.code == "step_conflict"
    with pytest.raises(ProtocolError) as stale:
        accept(box, *step(4, [(0, 2, 1)]))
    assert stale.value.code == "stale_step"
    assert box.expected_positions == [2, 0]


@pytest.mark.parametrize(
    ("bad", "code"),
    [(step(6, [(0, 3, 1)]), "bad_position"), (step(6, [(0, 2, 19)]), "cache_full")],
)
def test_a_step_that_does_not_fit_is_refused_before_it_is_examined(
    bad: tuple[Step, bytearray], code: str
) -> None:
    box = inbox()
    assert accept(box, *step(5, [(0, 0, 2)]))
    assert not box.needs_decoding(*step(5, [(0, 0, 2)]))
    with pytest.raises(ProtocolError) as refused:
        box.needs_decoding(*bad)
    assert refused.value.code == code


def test_of_two_steps_that_are_examined_at_once_one_is_taken() -> None:
    box = inbox()
    one, other = step(1, [(0, 0, 16)]), step(2, [(0, 0, 16)])
    assert box.needs_decoding(*one)
    assert box.needs_decoding(*other)
    assert box.accept(*one)
    with pytest.raises(ProtocolError) as refused:
        box.accept(*other)
    assert refused.value.code == "bad_position"
    assert box.expected_positions == [16, 0]


def test_older_epochs_are_dropped_and_future_ones_refused() -> None:
    box = inbox()
    box.state.begin_epoch(3, [0, 0])
    assert not accept(box, *step(1, [(0, 0, 1)], epoch=2))
    with pytest.raises(ProtocolError) as refused:
        accept(box, *step(1, [(0, 0, 1)], epoch=4))
    assert refused.value.code == "future_epoch"


def test_a_new_epoch_takes_an_undone_step_again() -> None:
    box = inbox()
    accept(box, *step(1, [(0, 0, 4)]))
    accept(box, *step(2, [(0, 4, 1)]))
    box.state.begin_epoch(2, [4, 0])
    assert accept(box, *step(2, [(0, 4, 1)], epoch=2))


@pytest.mark.parametrize(("epoch", "lengths"), [(1, [0, 0]), (0, [0, 0]), (2, [1, 0]), (2, [0])])
def test_impossible_epochs_change_nothing(epoch: int, lengths: list[int]) -> None:
    box = inbox()
    with pytest.raises(ProtocolError):
        box.state.begin_epoch(epoch, lengths)
    assert box.state.epoch == 1
    assert box.expected_positions == [0, 0]


def test_a_step_behind_what_the_cache_holds_is_refused() -> None:
    """Only a rollback, which begins an epoch, may have tokens computed again."""
    box = inbox()
    assert accept(box, *step(1, [(0, 0, 4)]))
    with pytest.raises(ProtocolError) as refused:
        accept(box, *step(2, [(0, 3, 1)]))
    assert refused.value.code == "bad_position"
    assert accept(box, *step(2, [(0, 4, 1)]))


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (step(1, [(0, 1, 1)]), "bad_position"),
        (step(1, [(2, 0, 1)]), "bad_rows"),
        (step(1, [(0, 0, 1), (0, 1, 1)]), "bad_rows"),
        (step(1, [(0, 0, 21)]), "cache_full"),
        (step(1, [(0, 0, 2)], shape=(3, HIDDEN)), "bad_tensor"),
        (step(1, [(0, 0, 2)], shape=(2, HIDDEN + 1)), "bad_tensor"),
        (step(1, [(0, 0, 2)], dtype=torch.bfloat16), "bad_tensor"),
        (step(1, [(0, 0, 2)], value=float("nan")), "not_finite"),
        (step(1, [(0, 0, 2)], value=float("inf")), "not_finite"),
        (step(1, [(0, 0, 2)], session=b"t" * 16), "unknown_session"),
    ],
)
def test_a_refused_step_leaves_no_trace(bad: tuple[Step, bytearray], code: str) -> None:
    box = inbox()
    with pytest.raises(ProtocolError) as refused:
        accept(box, *bad)
    assert refused.value.code == code
    assert box.expected_positions == [0, 0]
    assert accept(box, *step(1, [(0, 0, 2)]))
