"""What nodes of this process hold for sessions."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nesa_node.server.session.admission import Admission


class NodesSeen:
    """Make it before the nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[Admission] = []
        made, make = self._made, Admission.__init__

        def init(admission: Admission, *args: Any, **options: Any) -> None:
            make(admission, *args, **options)
            made.append(admission)

        monkeypatch.setattr(Admission, "__init__", init)

    @property
    def sessions(self) -> list[int]:
        """Of each node."""
        return [admission.sessions for admission in self._made]

    @property
    def are_free(self) -> bool:
        """Whether no node has a session or has promised a page."""
        return all(
            not admission.sessions and admission.free_tokens == admission.total_tokens
            for admission in self._made
        )

    def wait_until_free(self, seconds: float) -> float:
        """How long it took. Fails after `seconds`."""
        assert self._made
        began = time.monotonic()
        while not self.are_free:
            assert time.monotonic() < began + seconds, f"sessions are left: {self.sessions}"
            time.sleep(0.005)
        return time.monotonic() - began
