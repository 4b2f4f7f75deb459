"""Daemons that change their spans, watched from outside."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from nesa_node.core.ids import Span
from tests.faults.bed import Node
from tests.faults.nursery import POLL_S


def wait_until(happened: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


def span_of(node: Node) -> Span | None:
    """What a daemon serves now; None between two spans."""
    try:
        return Span(*json.loads(node.ready_path.read_text())["span"])
    except FileNotFoundError:
        return None
