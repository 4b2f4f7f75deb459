"""A tokenizer of sixty words, with a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted import tokenizer_in
from tests.cli.tiny import write_tiny_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("small") / "small")


@pytest.fixture(scope="session")
def tokenizer(small_model: Path) -> Any:
    return tokenizer_in(small_model)
