"""The model of the sessions over a network, and the same in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from nesa_node.client.graphs.graph_connection import GraphConnection
from nesa_node.core.ids import Span
from tests.engine.tiny_models import reference


@pytest.fixture(autouse=True)
def _state_of_one_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that another test's clients barred are not this one's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    # Learned positions, which the client adds: a wrong one shows whichever side is wrong.
    return tiny("gpt2")


@pytest.fixture(scope="module")
def alone(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = reference(folder)
    return model


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """The spans of pieces that requests run, in order."""
    found: list[Span] = []
    ask = GraphConnection._ask

    async def record(self: Any, link: Any, span: Span, *args: Any, **options: Any) -> Any:
        found.append(span)
        return await ask(self, link, span, *args, **options)

    monkeypatch.setattr(GraphConnection, "_ask", record)
    return found
