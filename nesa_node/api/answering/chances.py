"""Log probabilities as OpenAI's two shapes tell them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from nesa_node.api.answering.answer_room import take_room
from nesa_node.api.decoding.job import Chosen, Job, TokenChance
from nesa_node.web.problem import Problem

MOST = 1 << 20
"""Log probabilities of one request."""
_CHOSEN_BYTES, _OTHER_BYTES = 340, 160
"""What a token takes until its client reads it, and what each of the likeliest in its place."""

LEAST = -9999.0
"""OpenAI's word for impossible: JSON knows no infinity."""


_encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def take_room_for(jobs: Sequence[Job], *, param: str) -> None:
    """Have room for those of prompts and of answers together, as `take_room` does.

    Raises `Problem` where there may be too many.
    """
    asked = [job for job in jobs if job.top_logprobs is not None]
    count = sum(_tokens(job) * (1 + (job.top_logprobs or 0)) for job in asked)
    if count > MOST:
        raise Problem(
            400,
            f"{param}: this asks for up to {count} log probabilities, {MOST} are allowed; "
            "ask for fewer answers, prompts, tokens or log probabilities",
            code="invalid_value",
            param=param,
        )
    tokens = sum(map(_tokens, asked))
    take_room(tokens * _CHOSEN_BYTES + (count - tokens) * _OTHER_BYTES)


def _tokens(job: Job) -> int:
    return (len(job.prompt) * job.prompt_logprobs + job.max_tokens) * job.n


def entries(tokens: Iterable[Chosen]) -> list[msgspec.Raw]:
    """Of a chat's tokens, each as JSON: smaller to keep, and a long answer's are not all encoded at
    its end."""
    return [
        msgspec.Raw(
            _encode({**_chance(token), "top_logprobs": [_chance(other) for other in token.top]})
        )
        for token in tokens
    ]


class LegacyChances:
    """Of a completion's tokens: four lists. `text_offset` counts characters from `begin`."""

    def __init__(self, begin: int = 0) -> None:
        self._offset = begin
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, tokens: Iterable[Chosen], *, first_unknown: bool = False) -> dict[str, Any]:
        """`first_unknown`: the first one begins the text, so that nothing foretold it."""
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            known = not first_unknown or bool(lists["tokens"])
            lists["tokens"].append(_spelling(token))
            lists["token_logprobs"].append(_finite(token.logprob) if known else None)
            top = {_spelling(other): _finite(other.logprob) for other in token.top}
            # Also where it was not among the likeliest, as OpenAI has it.
            top.setdefault(lists["tokens"][-1], _finite(token.logprob))
            # As in `entries`.
            lists["top_logprobs"].append(msgspec.Raw(_encode(top)) if known else None)
            lists["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(token.data))
        return lists


def _chance(token: TokenChance) -> dict[str, Any]:
    return {
        "token": token.data.decode(errors="replace"),
        "logprob": _finite(token.logprob),
        "bytes": list(token.data),
    }


def _spelling(token: TokenChance) -> str:
    """Text, or its bytes where they are none: two such tokens must not become one key."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST) if logprob == logprob else LEAST
