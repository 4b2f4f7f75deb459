"""A prompt has tokens, and only those that the model has, whatever made it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tests.api.scripted import serving

CONTENTS_ONLY = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def asked(path: str, text: str) -> dict[str, Any]:
    return {"input": text} if path == RESPONSES else {"messages": [chat_message(text)]}


def chat_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_template_that_writes_nothing_is_told(
    tokenizer: Any, path: str, stream: bool
) -> None:
    silent = deepcopy(tokenizer)
    silent.chat_template = CONTENTS_ONLY
    async with serving(silent) as server:
        response = await server.post(path, asked(path, "") | {"stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert "no tokens" in error["message"]
        assert error["param"] == next(iter(asked(path, "")))
        assert (await server.post(path, asked(path, "hello"))).status_code == 200
        # Nothing is computed there.
        counted = await server.post("/tokenize", {"messages": [chat_message("")]})
        assert counted.json()["count"] == 0


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_tokens_that_a_model_lacks_are_told(tokenizer: Any, path: str) -> None:
    async with serving(tokenizer) as server:
        server.model.vocab_size = 5
        response = await server.post(path, asked(path, "hello"))
        assert response.status_code == 400
        assert "its last is 4" in response.json()["error"]["message"]
        assert server.model.jobs == []
