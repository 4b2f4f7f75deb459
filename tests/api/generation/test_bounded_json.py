"""JSON up to a bound."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.api.generation.bounded_json import dump_bounded_json, exceeds_json_chars
from nesa_node.api.generation.grammar import json_schema_grammar

VALUES: list[Any] = [{}, [], [1, 2.5, None, True, "\u00e9"], {"a": {"b": [[], {}]}}, 10**30]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


class Counted(list[int]):
    """A list that counts what is read of it."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        for one in super().__iter__():
            self.read += 1
            yield one


@pytest.mark.parametrize("value", VALUES)
def test_it_is_what_json_writes(value: Any) -> None:
    assert dump_bounded_json(value, 1000) == json.dumps(value)
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert dump_bounded_json(value, 1000, compact=True) == compact
    assert dump_bounded_json(value, len(compact), compact=True) == compact
    assert dump_bounded_json(value, len(compact) - 1, compact=True) is None


def test_no_more_is_read_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", None)
    numbers = Counted([1] * 10_000)
    assert dump_bounded_json({"enum": numbers}, 300) is None
    assert numbers.read == 0, "so long a list has as many commas"
    few = Counted([1] * 200)
    assert dump_bounded_json({"enum": [[2] * 200, few]}, 500) is None
    assert few.read <= 200


def test_a_schema_is_not_written_beyond_its_bound() -> None:
    numbers = Counted([1] * 200_000)
    with pytest.raises(ValueError, match="are allowed"):
        json_schema_grammar({"enum": numbers})
    assert numbers.read < 30_000


def test_what_lies_deep_takes_no_longer() -> None:
    flat: Any = [1] * 50_000
    deep = flat
    for _ in range(150):
        deep = [deep]
    seconds = []
    for value in (flat, deep):
        began = time.process_time()
        for _ in range(3):
            assert dump_bounded_json(value, 1 << 20) is not None
        seconds.append(time.process_time() - began)
    assert seconds[1] < 5 * seconds[0] + 0.05


@given(JSON)
def test_what_is_said_to_be_longer_is(value: Any) -> None:
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert not exceeds_json_chars(value, len(compact))
