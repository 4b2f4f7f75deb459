"""Log probabilities in OpenAI's two formats, of chats and of completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from nesa_node.api.answering.answer_room import take_room
from nesa_node.api.decoding.job import Chosen, Job, TokenChance
from nesa_node.web.problem import Problem

MOST = 1 << 20
"""Limit on the log probabilities of one request."""
_CHOSEN_BYTES, _OTHER_BYTES = 340, 160
"""Memory of a token's log probability, and of each alternative, until the client reads it."""

LEAST = -9999.0
"""OpenAI's value for probability 0: JSON has no infinity."""


_encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def take_room_for(jobs: Sequence[Job], *, param: str) -> None:
    """Reserve memory for the log probabilities of the prompts and answers of `jobs`.

    Raises `Problem` for more than `MOST` of them, and as `take_room` does.
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
    """JSON of each token of a chat, encoded now: it is smaller to keep, and the end of a long
    answer need not encode all of them."""
    return [
        msgspec.Raw(
            _encode({**_chance(token), "top_logprobs": [_chance(other) for other in token.top]})
        )
        for token in tokens
    ]


class LegacyChances:
    """Log probabilities of a completion as four lists; `text_offset` counts from `begin`."""

    def __init__(self, begin: int = 0) -> None:
        self._offset = begin
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, tokens: Iterable[Chosen], *, first_unknown: bool = False) -> dict[str, Any]:
        """Lists for `tokens`. `first_unknown`: the first token begins the text and has no value."""
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
            # The chosen token is listed even if it is not among the likeliest, as in OpenAI's API.
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
    """Text of a token, or its escaped bytes if they are not UTF-8: keys must stay distinct."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST) if logprob == logprob else LEAST
