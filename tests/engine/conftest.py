from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `save_tiny_model` keeps each model for the whole run."""
    return tmp_path_factory.mktemp("models")
