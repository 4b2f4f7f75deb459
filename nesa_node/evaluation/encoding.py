"""Text to token ids, split where a continuation begins."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from nesa_node.core.errors import ContextLengthError
from nesa_node.evaluation.scoring import Query

_CHARACTERS_PER_TOKEN = 16


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """All of `text`, with what the tokenizer itself puts before one (Llama 3: a token), once."""
    # Without `verbose` it says nothing about texts that are longer than the model's context.
    begun = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    encoded: Any = tokenizer(text, add_special_tokens=not begun, verbose=False)
    return list(encoded["input_ids"])


def first_tokens(tokenizer: PreTrainedTokenizerBase, text: str, count: int) -> list[int]:
    """The first `count` tokens of `text`, or fewer where it has no more."""
    ids = encode_text(tokenizer, text[: count * _CHARACTERS_PER_TOKEN])
    if len(ids) < count:
        ids = encode_text(tokenizer, text)
    return ids[:count]


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, *, most_tokens: int
) -> Query:
    """Score `continuation` after `context`, tokenized as one text.

    As in lm-evaluation-harness: white space at the context's end counts as the continuation's,
    whose tokens are those beyond the context's own number of tokens. An empty context is one
    beginning-of-text token (end-of-text, where the model has none). What exceeds `most_tokens` is
    cut off at the beginning; the last token is not fed and not counted.
    Raises `ContextLengthError` where the continuation alone exceeds it.
    """
    if context.strip():
        kept = context.rstrip()
        ids = encode_text(tokenizer, context + continuation)
        scored = len(ids) - len(encode_text(tokenizer, kept))
    else:
        encoded: Any = tokenizer(context + continuation, add_special_tokens=False, verbose=False)
        ids = [prefix_token(tokenizer), *encoded["input_ids"]]
        scored = len(ids) - 1
    if scored > most_tokens:
        raise ContextLengthError(f"{scored} tokens to score; the model holds {most_tokens}")
    # Tokens may join over the seam; one that the continuation ends in is always its own.
    return Query(ids[-most_tokens - 1 :], max(scored, 1))


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """What stands before a text that nothing precedes."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0
