"""Tokenizer data of a model that all answers share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from nesa_node.api.decoding.grammar import Grammars
from nesa_node.api.decoding.text_stream import TextRules
from nesa_node.api.decoding.token_bytes import TokenBytes


class Vocabulary:
    """Detokenizer rules, token bytes, grammars and end tokens of a model. Thread-safe."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        generation_config: GenerationConfig,
        *,
        vocab_size: int,
    ) -> None:
        """`vocab_size` is the model's: the tokenizer may have fewer tokens."""
        self.tokenizer = tokenizer
        self.size = vocab_size
        self.eos_ids = frozenset(_eos_ids(tokenizer, generation_config))
        """Tokens that end an answer, according to the model's files."""
        self.text_rules = TextRules(tokenizer)
        self.token_bytes = TokenBytes(tokenizer)
        self.grammars = Grammars(tokenizer, vocab_size, sorted(self.eos_ids))


def _eos_ids(tokenizer: Any, config: GenerationConfig) -> Iterable[int]:
    # Chat models often end a turn with a token that only one of the two files lists.
    for ids in (config.eos_token_id, tokenizer.eos_token_id):
        for one in ids if isinstance(ids, Sequence) else (ids,):
            if isinstance(one, int) and not isinstance(one, bool):
                yield one
