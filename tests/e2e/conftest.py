from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's small random model, made once."""
    folder = tmp_path_factory.getbasetemp() / "tiny-models"
    folder.mkdir(exist_ok=True)
    return lambda family: save_tiny_model(family, folder)
