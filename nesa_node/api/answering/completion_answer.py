"""Responses of `POST /v1/completions`: one JSON object, or chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from nesa_node.api.answering.answers import DONE, event
from nesa_node.api.answering.chances import LegacyChances
from nesa_node.api.answering.names import new_id
from nesa_node.api.answering.usage import Usage
from nesa_node.api.bodies.splitting import light
from nesa_node.api.decoding.job import Delta, PromptRead
from nesa_node.api.serving.jobs import Tagged

_Told = tuple[int, str, dict[str, Any] | None, str | None]
Run = Callable[[], AbstractAsyncContextManager[AsyncIterator[Tagged]]]


@dataclass(slots=True)
class _Choice:
    chances: LegacyChances | None
    text: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None

    def keep(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> None:
        self.text.append(text)
        for key, values in (logprobs or {}).items():
            self.logprobs.setdefault(key, []).extend(values)
        self.finish_reason = reason or self.finish_reason


class CompletionAnswer:
    """Builder of the response to one completion request.

    Choice `p * n + i` is answer `i` to prompt `p`. `echoes` are the prompts' texts, with `echo`.
    """

    def __init__(
        self,
        model: str,
        fingerprint: str,
        *,
        n: int,
        prompts: int,
        echoes: Sequence[str] | None,
        logprobs: bool,
        usage: Usage,
    ) -> None:
        self._n = n
        self._echoes = echoes
        self._usage = usage
        self._choices = [_Choice(LegacyChances() if logprobs else None) for _ in range(n * prompts)]
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    async def whole(self, run: Run) -> dict[str, Any]:
        async with self._usage.counted(), run() as events:
            async for tagged in events:
                for index, text, logprobs, reason in await self._read(tagged):
                    self._choices[index].keep(text, logprobs, reason)
        choices = [
            _choice(
                index,
                "".join(choice.text),
                choice.logprobs if choice.chances else None,
                choice.finish_reason or "length",
            )
            for index, choice in enumerate(self._choices)
        ]
        return {**self._head, "choices": choices, "usage": self._usage.body()}

    async def chunks(self, run: Run, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
        rest: dict[str, Any] = {"usage": None} if with_usage else {}
        async with self._usage.counted(), run() as events:
            async for tagged in events:
                for told in await self._read(tagged):
                    if told[1] or told[2] or told[3]:
                        yield event({**self._head, "choices": [_choice(*told)], **rest})
        if with_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.body()})
        yield DONE

    async def _read(self, tagged: Tagged) -> list[_Told]:
        """Index, text, log probabilities and finish reason of the choices it updates."""
        job, happened = tagged
        self._usage.count(happened)
        if isinstance(happened, Delta):
            index = job * self._n + happened.index
            chances = self._choices[index].chances
            logprobs = chances.read(happened.tokens) if chances and happened.tokens else None
            return [(index, happened.text, logprobs, happened.finish_reason)]
        # A prompt may have many log probabilities, which come in one event.
        size = self._n * sum(1 + len(token.top) for token in happened.tokens)
        return await light(size, lambda: self._echo(job, happened))

    def _echo(self, job: int, happened: PromptRead) -> list[_Told]:
        if self._echoes is None:
            return []
        told: list[_Told] = []
        for index in range(job * self._n, (job + 1) * self._n):
            chances = self._choices[index].chances
            logprobs = chances.read(happened.tokens, first_unknown=True) if chances else None
            told.append((index, self._echoes[job], logprobs, None))
        return told


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
