"""Log probabilities in OpenAI's two formats, of chats and of completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from nesa_node.api.generation.job import CandidateToken, Job, SequenceToken
from nesa_node.api.responses.in_flight import reserve_memory
from nesa_node.web.problem import invalid_request

MAX_LOGPROBS = 1 << 20
"""Limit on the log probabilities of one request."""
_TOKEN_BYTES, _CANDIDATE_BYTES = 340, 160
"""Memory of a token's log probability, and of each alternative, until the client reads it."""

MIN_LOGPROB = -9999.0
"""OpenAI's value for probability 0: JSON has no infinity."""


_encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def reserve_logprobs(jobs: Sequence[Job], *, is_private: bool, param: str) -> None:
    """Reserve memory for the log probabilities of the prompts and answers of `jobs`.

    Raises `HttpProblem` for more than `MAX_LOGPROBS` of them, where the model's nodes multiply
    encrypted vectors (`is_private`), and as `reserve_memory` does.
    """
    asked = [job for job in jobs if job.top_logprobs is not None]
    if asked and is_private:
        raise invalid_request(
            f"{param}: this gateway runs with --private, and gives no numbers that it decrypted, "
            "from which its key could be computed; ask for text alone",
            param=param,
        )
    count = sum(_count_tokens(job) * (1 + (job.top_logprobs or 0)) for job in asked)
    if count > MAX_LOGPROBS:
        raise invalid_request(
            f"{param}: this asks for up to {count} log probabilities, {MAX_LOGPROBS} are allowed; "
            "ask for fewer answers, prompts, tokens or log probabilities",
            param=param,
        )
    tokens = sum(map(_count_tokens, asked))
    reserve_memory(tokens * _TOKEN_BYTES + (count - tokens) * _CANDIDATE_BYTES)


def _count_tokens(job: Job) -> int:
    return (len(job.prompt) * job.prompt_logprobs + job.max_tokens) * job.n


def encode_chat_logprobs(tokens: Iterable[SequenceToken]) -> list[msgspec.Raw]:
    """JSON of each token of a chat, encoded now: it is smaller to keep, and the end of a long
    answer need not encode all of them."""
    return [
        msgspec.Raw(
            _encode({**_to_dict(token), "top_logprobs": [_to_dict(other) for other in token.top]})
        )
        for token in tokens
    ]


class CompletionLogprobsEncoder:
    """Log probabilities of a completion as four lists; `text_offset` counts from `begin`."""

    def __init__(self, first_offset: int = 0) -> None:
        self._text_offset = first_offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def encode(
        self, tokens: Iterable[SequenceToken], *, is_text_start: bool = False
    ) -> dict[str, Any]:
        """Lists for `tokens`. `is_text_start`: the first token begins the text and has no value."""
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            known = not is_text_start or bool(lists["tokens"])
            lists["tokens"].append(_token_text(token))
            lists["token_logprobs"].append(_clamp_logprob(token.logprob) if known else None)
            top = {_token_text(other): _clamp_logprob(other.logprob) for other in token.top}
            # The chosen token is listed even if it is not among the likeliest, as in OpenAI's API.
            top.setdefault(lists["tokens"][-1], _clamp_logprob(token.logprob))
            # As in `encode_chat_logprobs`.
            lists["top_logprobs"].append(msgspec.Raw(_encode(top)) if known else None)
            lists["text_offset"].append(self._text_offset)
            self._text_offset += len(self._decoder.decode(token.data))
        return lists


def _to_dict(token: CandidateToken) -> dict[str, Any]:
    return {
        "token": token.data.decode(errors="replace"),
        "logprob": _clamp_logprob(token.logprob),
        "bytes": list(token.data),
    }


def _token_text(token: CandidateToken) -> str:
    """Text of a token, or its escaped bytes if they are not UTF-8: keys must stay distinct."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def _clamp_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB) if logprob == logprob else MIN_LOGPROB
