"""How many tokens a request took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nesa_node.api.job import Event, Job, PromptRead


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int = 0
    new_tokens: int = 0

    @classmethod
    def of(cls, jobs: Iterable[Job]) -> Usage:
        return cls(sum(len(job.prompt) for job in jobs))

    def count(self, event: Event) -> None:
        if isinstance(event, PromptRead):
            self.cached_tokens += event.cached_tokens
        else:
            self.new_tokens += len(event.tokens)

    def body(self) -> dict[str, Any]:
        """As chats and completions tell it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
