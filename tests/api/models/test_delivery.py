"""What threads send arrives in order, wakes the reader once, and outlives its loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from nesa_node.api.models.served_model import ThreadChannel


async def test_everything_arrives_in_order_then_the_end() -> None:
    delivery = ThreadChannel[int]()

    def send() -> None:
        for number in range(1000):
            delivery.put([number])
            if number % 100 == 0:
                time.sleep(0.001)
        delivery.end()

    thread = threading.Thread(target=send)
    thread.start()
    assert [number async for number in delivery] == list(range(1000))
    thread.join()
    assert [number async for number in delivery] == []


async def test_an_error_comes_after_what_was_sent_before_it() -> None:
    delivery = ThreadChannel[int]()
    delivery.put([1, 2])
    delivery.end(LookupError("lost"))
    assert [await anext(delivery), await anext(delivery)] == [1, 2]
    with pytest.raises(LookupError, match="lost"):
        await anext(delivery)
    with pytest.raises(StopAsyncIteration):
        await anext(delivery)


@pytest.mark.parametrize("closed_first", [True, False])
async def test_an_error_that_is_not_read_is_not_kept(closed_first: bool) -> None:
    """Its traceback holds the sender, which holds the delivery: only a collection would free it."""

    class Held:
        pass

    async def make() -> weakref.ref[Held]:
        held, delivery = Held(), ThreadChannel[int]()
        if closed_first:
            delivery.close()
        try:
            raise LookupError(held, delivery)
        except LookupError as error:
            delivery.end(error)
        if not closed_first:
            delivery.close()
        return weakref.ref(held)

    gc.disable()
    try:
        held = await make()
        await asyncio.sleep(0)
        assert held() is None
    finally:
        gc.enable()


async def test_the_loop_is_woken_once_for_all_that_comes_before_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    wake, woken = loop.call_soon_threadsafe, []

    def count(*args: object) -> object:
        woken.append(args)
        return wake(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    delivery = ThreadChannel[int]()
    for number in range(50):
        delivery.put([number])
    assert len(woken) == 1
    assert await anext(delivery) == 0
    await asyncio.sleep(0)
    delivery.put([50])
    assert len(woken) == 2


def test_a_sender_may_outlive_the_loop() -> None:
    async def make() -> ThreadChannel[int]:
        return ThreadChannel[int]()

    delivery = asyncio.run(make())
    delivery.put([1])
    delivery.end()
