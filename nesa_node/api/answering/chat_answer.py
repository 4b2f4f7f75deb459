"""Responses of `POST /v1/chat/completions`: one JSON object, or chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw

from nesa_node.api.answering import chances
from nesa_node.api.answering.answers import DONE, event
from nesa_node.api.answering.names import new_id
from nesa_node.api.answering.usage import Usage
from nesa_node.api.bodies.tool_calls import CallReader
from nesa_node.api.decoding.job import Delta, PromptRead
from nesa_node.api.serving.jobs import Tagged

Run = Callable[[], AbstractAsyncContextManager[AsyncIterator[Tagged]]]


@dataclass(slots=True)
class _Choice:
    """State of one choice; `reader` is set if the answer may call tools."""

    reader: CallReader | None
    text: list[str] = field(default_factory=list)
    chances: list[Raw] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def read(self, delta: Delta) -> tuple[str, list[dict[str, Any]], str | None]:
        """Text, tool calls and finish reason that `delta` adds."""
        text, reason = delta.text, delta.finish_reason
        calls: list[dict[str, Any]] = []
        if self.reader is not None:
            text = self.reader.feed(text)
            if reason is not None:
                rest, calls = self.reader.finish()
                text += rest
        return text, calls, "tool_calls" if calls else reason

    def keep(self, delta: Delta, *, logprobs: bool) -> None:
        text, calls, reason = self.read(delta)
        self.text.append(text)
        if logprobs:
            self.chances += chances.entries(delta.tokens)
        self.calls += calls
        self.finish_reason = reason


class ChatAnswer:
    """Builder of the response to one chat request."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        *,
        n: int,
        logprobs: bool,
        usage: Usage,
        reader: Callable[[], CallReader] | None = None,
    ) -> None:
        self._n = n
        self._logprobs = logprobs
        self._usage = usage
        self._choices = [_Choice(reader and reader()) for _ in range(n)]
        self._head = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    async def whole(self, run: Run) -> dict[str, Any]:
        async with self._usage.counted(), run() as events:
            async for _, happened in events:
                self._usage.count(happened)
                if isinstance(happened, Delta):
                    self._choices[happened.index].keep(happened, logprobs=self._logprobs)
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": self._usage.body()}

    async def chunks(self, run: Run, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
        self._head["object"] = "chat.completion.chunk"
        # OpenAI sends `"usage": null` in chunks only if `include_usage` is set.
        rest: dict[str, Any] = {"usage": None} if with_usage else {}
        async with self._usage.counted(), run() as events:
            async for _, happened in events:
                self._usage.count(happened)
                if isinstance(happened, PromptRead):
                    for index in range(self._n):
                        opening = {"role": "assistant", "content": ""}
                        yield self._chunk(index, opening, None, None, rest)
                    continue
                for data in self._delta(happened, rest):
                    yield data
        if with_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.body()})
        yield DONE

    def _delta(self, delta: Delta, rest: dict[str, Any]) -> list[bytes]:
        text, calls, reason = self._choices[delta.index].read(delta)
        logprobs = None
        if self._logprobs and delta.tokens:
            logprobs = _logprobs(chances.entries(delta.tokens))
        told = []
        if text or logprobs is not None:
            told.append(self._chunk(delta.index, {"content": text}, logprobs, None, rest))
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            told.append(self._chunk(delta.index, {"tool_calls": numbered}, None, None, rest))
        if reason is not None:
            told.append(self._chunk(delta.index, {}, None, reason, rest))
        return told

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: str | None,
        rest: dict[str, Any],
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head, "choices": [choice], **rest})

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not choice.calls else None,
            "refusal": None,
        }
        if choice.calls:
            message["tool_calls"] = choice.calls
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(choice.chances) if self._logprobs else None,
            "finish_reason": choice.finish_reason or "stop",
        }


def _logprobs(entries: list[Raw]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}
