"""Responses of `POST /v1/responses`: one JSON object, or typed events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from msgspec import Raw

from nesa_node.api.answering import chances
from nesa_node.api.answering.answers import named_event
from nesa_node.api.answering.names import new_id
from nesa_node.api.answering.usage import Usage
from nesa_node.api.bodies.response_body import ResponseBody
from nesa_node.api.decoding.job import Delta, Job, PromptRead
from nesa_node.api.serving.jobs import Tagged
from nesa_node.web.problem import Problem

Run = Callable[[], AbstractAsyncContextManager[AsyncIterator[Tagged]]]


class ResponseAnswer:
    """Builder of a response with one message of one part; `sequence_number` counts its events."""

    def __init__(self, body: ResponseBody, job: Job, *, usage: Usage) -> None:
        self._body = body
        self._sampling = job.sampling
        self._logprobs = job.top_logprobs is not None
        self._usage = usage
        self._id = new_id("resp_")
        self._item_id = new_id("msg_")
        self._created_at = int(time.time())
        self._text: list[str] = []
        self._chances: list[Raw] = []
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._events = 0

    async def whole(self, run: Run) -> dict[str, Any]:
        async with self._usage.counted(), run() as events:
            async for _, happened in events:
                self._keep(happened)
        return self._response()

    async def events(self, run: Run) -> AsyncGenerator[bytes, None]:
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        async with self._usage.counted(), run() as events:
            async for _, happened in events:
                logprobs = self._keep(happened)
                if isinstance(happened, PromptRead):
                    for data in self._opening(at):
                        yield data
                elif happened.text or logprobs:
                    yield self._event(
                        "response.output_text.delta", **at, delta=happened.text, logprobs=logprobs
                    )
        for data in self._ending(at):
            yield data

    def failed(self, problem: Problem) -> bytes:
        """Last event of a stream that failed."""
        self._status = "failed"
        self._error = {"code": problem.code or "server_error", "message": problem.message}
        return self._event("response.failed", response=self._response())

    def _keep(self, happened: PromptRead | Delta) -> list[Raw]:
        """Add an event to the response; return its log probabilities."""
        self._usage.count(happened)
        if isinstance(happened, PromptRead):
            return []
        self._text.append(happened.text)
        brought = chances.entries(happened.tokens) if self._logprobs else []
        self._chances += brought
        if happened.finish_reason is not None:
            self._status = "incomplete" if happened.finish_reason == "length" else "completed"
        return brought

    def _opening(self, at: dict[str, Any]) -> list[bytes]:
        item = {**self._item(), "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.created", response=self._response()),
            self._event("response.in_progress", response=self._response()),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **at, part=part),
        ]

    def _ending(self, at: dict[str, Any]) -> Iterator[bytes]:
        part = self._part()
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        # Yielded one by one: each of these events holds the whole answer.
        yield self._event("response.output_text.done", **at, **done)
        yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=0, item=self._item())
        yield self._event(f"response.{self._status}", response=self._response())

    def _event(self, kind: str, **data: Any) -> bytes:
        self._events += 1
        return named_event({"type": kind, "sequence_number": self._events - 1, **data})

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": "".join(self._text),
            "annotations": [],
            "logprobs": self._chances,
        }

    def _item(self) -> dict[str, Any]:
        status = "completed" if self._status == "completed" else "incomplete"
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self._part()],
        }

    def _response(self) -> dict[str, Any]:
        body, running = self._body, self._status == "in_progress"
        given = None if body.text is None else body.text.format
        shape: Any = {"type": "text"}
        if given is not None:
            shape = given.model_dump(by_alias=True, exclude_none=True)
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": [] if running else [self._item()],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            # Responses are never stored, whatever the request asked for.
            "store": False,
            "temperature": self._sampling.temperature,
            "text": {"format": shape},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": None if running else self._spent(),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _spent(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.new_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.new_tokens,
        }
