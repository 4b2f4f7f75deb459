"""JSON up to a bound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from nesa_node.api.decoding.bounded_json import bounded_json
from nesa_node.api.decoding.grammar import json_schema_grammar

VALUES: list[Any] = [{}, [], [1, 2.5, None, True, "\u00e9"], {"a": {"b": [[], {}]}}, 10**30]


class Counted(list[int]):
    """A list that counts what is read of it."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        for one in super().__iter__():
            self.read += 1
            yield one


@pytest.mark.parametrize("value", VALUES)
def test_it_is_what_json_writes(value: Any) -> None:
    assert bounded_json(value, 1000) == json.dumps(value)
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert bounded_json(value, 1000, compact=True) == compact
    assert bounded_json(value, len(compact), compact=True) == compact
    assert bounded_json(value, len(compact) - 1, compact=True) is None


def test_no_more_is_read_than_fits() -> None:
    numbers = Counted([1] * 10_000)
    assert bounded_json({"enum": numbers}, 300) is None
    assert 0 < numbers.read <= 101


def test_a_schema_is_not_written_beyond_its_bound() -> None:
    numbers = Counted([1] * 200_000)
    with pytest.raises(ValueError, match="are allowed"):
        json_schema_grammar({"enum": numbers})
    assert 0 < numbers.read < 30_000
