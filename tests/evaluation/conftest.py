from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.tiny import write_tiny_model


@pytest.fixture(scope="session")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four blocks over a vocabulary of 64 words."""
    return write_tiny_model(tmp_path_factory.mktemp("evaluation") / "tiny")
