"""Token usage of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from nesa_node.api.decoding.job import Event, PromptRead


@dataclass(slots=True)
class Usage:
    """Token counts of a request, passed to `spend` as they grow; prompts with the first event."""

    prompt_tokens: int
    spend: Callable[[int], None]
    cached_tokens: int = 0
    new_tokens: int = 0
    _begun: bool = False

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Charge the prompt even if the client cancels the request during prefill."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self._begin()
            raise

    def count(self, event: Event) -> None:
        self._begin()
        if isinstance(event, PromptRead):
            self.cached_tokens += event.cached_tokens
        elif event.tokens:
            self.new_tokens += len(event.tokens)
            self.spend(len(event.tokens))

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self.spend(self.prompt_tokens)

    def body(self) -> dict[str, Any]:
        """`usage` object of chats and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
