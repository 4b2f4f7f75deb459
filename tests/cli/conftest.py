"""Commands run in this process set up logging for a process of their own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _logging_given_back(logging_given_back: None) -> None:
    pass
