"""The model of the sessions over a network, and the same in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

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
