"""Constrained decoding: token masks that make an answer follow a JSON schema (llguidance).

V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nesa_node.api.generation.bounded_json import (
    MAX_SCHEMA_BYTES,
    WHITESPACE_RULES,
    dump_bounded_json,
)
from nesa_node.api.processes.grammar_program import parser_limits
from nesa_node.web.authenticator import current_caller
from nesa_node.web.rate_limits import FairSlots

MAX_MATCHERS = 64
"""Limit on answers in this process that follow grammars at once, plus a quarter for keys that have
few. A hard pattern takes up to 35 MB of memory, of which `MAX_LEXER_BYTES` at the start."""
MAX_MATCHER_CPU_S = 2.0
"""CPU time budget for the masks of an answer, which regains `CPU_S_PER_TOKEN` with each token."""
CPU_S_PER_TOKEN = 0.02
"""CPU time of a mask that costs no budget; usual schemas take 0.1 ms, 5 ms at most."""
_RETRY_S = 2.0
_MAX_REASON_CHARS = 200

_matcher_shares = FairSlots(MAX_MATCHERS, "answers that follow a schema", retry_after_s=_RETRY_S)


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """llguidance grammar of JSON on one line that fits `schema`; not checked yet.

    Raises `ValueError` for a schema that is not JSON or too large.
    """
    try:
        text = dump_bounded_json(schema, MAX_SCHEMA_BYTES)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the JSON schema is no JSON: {error}") from None
    if text is None:
        raise ValueError(
            f"the JSON schema has more than the {MAX_SCHEMA_BYTES} characters that are allowed"
        )
    rules: Any = WHITESPACE_RULES
    return LLMatcher.grammar_from_json_schema(text, overrides=rules)


class GrammarCompiler:
    """Compiler of grammars for one tokenizer. Thread-safe."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = max(vocab_size, len(tokenizer))
        self._eos_ids = list(eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._refusal: str | None = None
        """Why llguidance cannot use the tokenizer; cached, since an attempt takes a second."""

    def compile(self, grammar: str) -> GrammarMatcher:
        """Compile a checked grammar for one answer. Raises `ValueError` if that fails."""
        matcher = LLMatcher(self.prepare(), grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise ValueError(
                f"the grammar cannot be followed: {matcher.get_error()[:_MAX_REASON_CHARS]}"
            )
        return GrammarMatcher(matcher)

    @contextmanager
    def open_matchers(self, grammar: str, count: int) -> Iterator[list[GrammarMatcher]]:
        """Matchers of a checked grammar for `count` answers, within the limit `MAX_MATCHERS`.

        Raises `ValueError` as `compile` does or for more answers than the limit, and `HttpProblem`
        as `FairSlots` does.
        """
        if count > _matcher_shares.num_slots:
            raise ValueError(
                f"at most {_matcher_shares.num_slots} answers to a request may follow a schema"
            )
        with _matcher_shares.hold(current_caller(), count):
            first = self.compile(grammar)
            yield [first, *(first.copy() for _ in range(count - 1))]

    def prepare(self) -> LLTokenizer:
        """llguidance's tokenizer, created by the first call and shared by all answers.

        Creating it holds the GIL for a second with a large vocabulary: call it before requests
        are served. Raises `ValueError` for a tokenizer that llguidance does not support.
        """
        with self._lock:
            if self._tokenizer is None and self._refusal is None:
                hf: Any = self._hf_tokenizer
                eos: Any = self._eos_ids or None
                try:
                    self._tokenizer = from_tokenizer(hf, n_vocab=self._vocab_size, eos_token=eos)
                except ValueError as error:
                    self._refusal = str(error)[:_MAX_REASON_CHARS]
            if self._tokenizer is None:
                raise ValueError(
                    f"this model's tokenizer cannot be made to follow a grammar: {self._refusal}"
                )
            return self._tokenizer


class GrammarMatcher:
    """Position of one answer in its grammar. Used by one thread at a time.

    llguidance bounds the work of a step; `MAX_MATCHER_CPU_S` and `CPU_S_PER_TOKEN` bound that of
    all steps.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._cpu_budget_s = MAX_MATCHER_CPU_S

    def copy(self) -> GrammarMatcher:
        """Matcher of another answer, at the same position."""
        return GrammarMatcher(self._matcher.deep_copy())

    def allowed_mask(self, vocab_size: int, device: torch.device) -> Tensor:
        """Mask of the tokens that may come next: bool [V] on `device`.

        Raises `ValueError` if the grammar is too expensive to follow at this position.
        """
        with self._charge_cpu_time():
            mask = self._matcher.compute_bitmask()
        bits = np.frombuffer(mask, dtype=np.uint8)
        flags = np.unpackbits(bits, bitorder="little", count=vocab_size)
        return torch.from_numpy(flags.view(np.bool_)).to(device)

    def accept_token(self, token_id: int) -> bool:
        """Advance by an allowed token; True if the answer is complete.

        Raises `ValueError` as `allowed_mask` does: a matcher that failed also reports that it
        stopped.
        """
        with self._charge_cpu_time():
            self._matcher.consume_token(token_id)
        self._cpu_budget_s = min(self._cpu_budget_s + CPU_S_PER_TOKEN, MAX_MATCHER_CPU_S)
        return self._matcher.is_stopped()

    @contextmanager
    def _charge_cpu_time(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self._cpu_budget_s -= time.thread_time() - began
        if self._matcher.is_error():
            raise ValueError(
                f"the grammar became too complex: {self._matcher.get_error()[:_MAX_REASON_CHARS]}"
            )
        if self._cpu_budget_s < 0:
            raise ValueError("the grammar takes too long to follow: its patterns are too hard")
