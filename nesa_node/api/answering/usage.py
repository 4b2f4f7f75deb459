"""How many tokens a request took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from nesa_node.api.decoding.job import Event, PromptRead


@dataclass(slots=True)
class Usage:
    """`spend` is told of tokens as they are computed, and of the prompts with the first event."""

    prompt_tokens: int
    spend: Callable[[int], None]
    cached_tokens: int = 0
    new_tokens: int = 0
    _begun: bool = False

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Around the answer: whoever leaves while the prompt is read has to pay for it, too."""
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
        """As chats and completions tell it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
