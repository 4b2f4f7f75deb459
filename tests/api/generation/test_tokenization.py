"""Texts of strangers' models into tokens and back, within bounds of memory."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from nesa_node.api.generation.tokenization import decode_all, encode_blocking, offload_if_large
from nesa_node.api.processes.template_program import MAX_TEXT_CHARS
from nesa_node.engine.weights.tokenizer import MAX_TOKEN_CHARS, sanitize_tokenizer
from nesa_node.web.problem import HttpProblem
from tests.api.scripted import until

LONG = "\U0001d4b3" * MAX_TOKEN_CHARS
ISOLATED = {"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": False}


def tokenizer_of(**model: Any) -> Any:
    """One that a stranger may choose: a token for each `a`, and none for other letters."""
    content = {
        "model": {"type": "BPE", "vocab": {"a": 0, LONG: 1}, "merges": [], **model},
        "pre_tokenizer": ISOLATED,
    }
    checked = sanitize_tokenizer(json.dumps(content).encode())
    of_any_type: Any = PreTrainedTokenizerFast
    return of_any_type(tokenizer_object=Tokenizer.from_str(checked.decode()))


def test_a_text_that_makes_no_tokens_has_a_limit_all_the_same() -> None:
    with pytest.raises(HttpProblem, match=f"messages: a text of .* at most {MAX_TEXT_CHARS}"):
        encode_blocking(
            tokenizer_of(),
            "b" * (MAX_TEXT_CHARS + 1),
            add_special_tokens=True,
            max_tokens=2**31 - 1,
            param="messages",
        )


def test_a_model_that_says_it_holds_more_tokens_than_are_split_gets_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nesa_node.api.generation.tokenization._MAX_TOKENS", 1 << 13)
    bounded = partial(
        encode_blocking,
        tokenizer_of(),
        add_special_tokens=True,
        max_tokens=2**31 - 1,
        param="prompt",
    )
    assert len(bounded("a" * (1 << 13))) == 1 << 13
    with pytest.raises(HttpProblem, match="8192 tokens"):
        bounded("a" * (1 << 14))


async def test_tokens_are_joined_to_as_long_a_text_as_may_be_split() -> None:
    tokenizer = tokenizer_of()
    longest = MAX_TEXT_CHARS // MAX_TOKEN_CHARS
    with pytest.raises(HttpProblem, match=f"tokens: .* at most {MAX_TEXT_CHARS}"):
        await decode_all(tokenizer, [[1] * longest, [0]], param="tokens")
    few, none = await decode_all(tokenizer, [[0, 1, 0], []], param="tokens")
    assert few.replace(" ", "") == f"a{LONG}a"
    assert none == ""


async def test_huge_texts_are_split_by_twos_while_small_ones_go_on() -> None:
    begun: list[int] = []
    may_end = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        may_end.wait(30)

    huge = [
        asyncio.create_task(offload_if_large(1 << 20, partial(work, number), takes_memory=True))
        for number in range(4)
    ]
    try:
        await until(lambda: len(begun) == 2)
        async with asyncio.timeout(10):
            assert await offload_if_large(1 << 15, lambda: "small", takes_memory=True) == "small"
            assert await offload_if_large(1 << 20, lambda: "no text") == "no text"
        assert len(begun) == 2
    finally:
        may_end.set()
    await asyncio.gather(*huge)
    assert len(begun) == 4


async def test_few_tokens_of_long_texts_are_joined_in_a_thread() -> None:
    threads: list[int] = []

    class Noting:
        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def decode(self, ids: list[int]) -> str:
            threads.append(threading.get_ident())
            text: str = self._tokenizer.decode(ids)
            return text

    tokenizer = Noting(tokenizer_of())
    await decode_all(tokenizer, [[0] * 100], param="tokens")
    assert threads == [threading.get_ident()]
    await decode_all(tokenizer, [[1] * 20, [0]], param="tokens")
    assert len(threads) == 3
    assert threading.get_ident() not in threads[1:]
    # There all other threads would wait.
    await decode_all(tokenizer, [[1] * 100], param="tokens")
    assert len(threads) == 3
