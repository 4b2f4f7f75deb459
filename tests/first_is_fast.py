"""Cases of a parametrized test of which continuous integration runs one each time."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def first_is_fast(*values: Any) -> list[ParameterSet]:
    """The values of one parameter; tests of all but the first are slow ones."""
    first, *more = values
    return [pytest.param(first), *(pytest.param(each, marks=pytest.mark.slow) for each in more)]
