"""Text generation: encoding of prompts, streaming of the answer, and its timing.

Works with a model of the swarm and a local transformers model alike, which `demo` compares.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from nesa_node.core.logging import escape_lines

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """Parameters of one answer: greedy, unless `temperature` or `top_p` is set."""

    max_new_tokens: int = 128
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def generate_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for transformers' `generate`."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        if self.min_new_tokens is not None:
            options["min_new_tokens"] = self.min_new_tokens
        if self.temperature is None and self.top_p is None:
            # transformers would warn of sampling values in the model's own generation config.
            return options | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        chosen = {"temperature": self.temperature, "top_p": self.top_p}
        return options | {"do_sample": True} | {k: v for k, v in chosen.items() if v is not None}


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Generated tokens and text, with their timing."""

    token_ids: tuple[int, ...]
    text: str
    first_token_s: float
    decode_s: float
    """From the first token to the last one."""

    @property
    def tokens_per_s(self) -> float:
        """Decode speed after the first token; 0 if there was only one."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 else 0.0


class _TimedStreamer(TextStreamer):
    """Streamer that writes text to `out`, and records the time of each token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.out = out
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.out is not None:
            # Text from nodes is untrusted: it may contain terminal control characters.
            text = escape_lines(text) if self.out.isatty() else text
            print(text, end="\n" if stream_end else "", flush=True, file=self.out)


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, template: bool
) -> torch.Tensor:
    """Token ids [1, L] (int64) of a conversation; without a template, of its last message."""
    encoded: Any
    if template:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(messages[-1]["content"], return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def generate_answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    ids_1L: torch.Tensor,
    sampling: GenerationParams,
    *,
    out: TextIO | None,
    **options: Any,
) -> TimedAnswer:
    """Generate after the prompt `ids_1L` [1, L], and stream the text to `out`.

    `model` is any object with transformers' `generate`, which gets `options` as given.
    """
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    streamer = _TimedStreamer(tokenizer, out)
    started = time.perf_counter()
    ids = model.generate(
        input_ids=ids_1L,
        attention_mask=torch.ones_like(ids_1L),
        streamer=streamer,
        **sampling.generate_kwargs(),
        **options,
    )
    new_ids = ids[0, ids_1L.shape[1] :].tolist()
    first = streamer.times[0] if streamer.times else time.perf_counter()
    last = streamer.times[-1] if streamer.times else first
    text = str(tokenizer.decode(new_ids, skip_special_tokens=True))
    return TimedAnswer(tuple(new_ids), text, first - started, last - first)
