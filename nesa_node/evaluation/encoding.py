"""Tokenization of texts, and of contexts with continuations to score."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from nesa_node.core.errors import ContextLengthError
from nesa_node.evaluation.scoring import Query

_CHARACTERS_PER_TOKEN = 16
"""Characters tokenized per wanted token; the whole text is tokenized if that gives too few."""


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of `text`, with the tokenizer's own prefix (Llama 3: a bos token) once."""
    # `verbose=False` suppresses the warning about texts longer than the model's context.
    begun = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    encoded: Any = tokenizer(text, add_special_tokens=not begun, verbose=False)
    return list(encoded["input_ids"])


def first_tokens(tokenizer: PreTrainedTokenizerBase, text: str, count: int) -> list[int]:
    """The first `count` tokens of `text`, or all if it has fewer."""
    ids = encode_text(tokenizer, text[: count * _CHARACTERS_PER_TOKEN])
    if len(ids) < count:
        ids = encode_text(tokenizer, text)
    return ids[:count]


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, *, most_tokens: int
) -> Query:
    """A query that scores `continuation` after `context`, tokenized as one text.

    As in lm-evaluation-harness, white space at the end of the context belongs to the continuation,
    and the continuation's tokens are those beyond the number of tokens of the context alone. An
    empty context is one beginning-of-text token (end-of-text if the model has none). Texts beyond
    `most_tokens` are truncated on the left; the last token is not fed and not counted. Raises
    `ContextLengthError` if the continuation alone exceeds `most_tokens`.
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
    # A token may span context and continuation; at least the last token is scored.
    return Query(ids[-most_tokens - 1 :], max(scored, 1))


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token before a text without context: bos, else eos, else 0."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0
