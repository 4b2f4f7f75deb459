"""What a body costs before its fields are looked at."""

from __future__ import annotations

import json

import pytest

from nesa_node.api.bodies import reading
from nesa_node.api.bodies.chat_body import ChatBody
from nesa_node.web.problem import Problem


@pytest.mark.parametrize("empty", ["[]", "{}"])
def test_a_body_of_millions_of_lists_is_refused_before_they_are_made(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "from_json", None)
    body = f'{{"model":"m","messages":[],"metadata":[{f"{empty}," * 300_000}0]}}'
    with pytest.raises(Problem, match="brackets") as refused:
        reading.parse(ChatBody, body.encode())
    assert refused.value.status == 400


def test_a_long_conversation_is_read() -> None:
    messages = [{"role": "user", "content": "a[0] = {};" * 20}] * 4096
    body = reading.parse(ChatBody, json.dumps({"model": "m", "messages": messages}).encode())
    assert len(body.messages) == 4096
