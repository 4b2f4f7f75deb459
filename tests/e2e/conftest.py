"""The model of the sessions over a network, and the same in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.engine.tiny_models import reference


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    # Learned positions, which the client adds: a wrong one shows whichever side is wrong.
    return tiny("gpt2")


@pytest.fixture(scope="module")
def alone(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = reference(folder)
    return model
