"""Multiple-choice items generated from running text: endings of other passages are wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

from nesa_node.core.errors import ConfigError
from nesa_node.evaluation.choices import Item

CONTEXT_WORDS = 24
ENDING_WORDS = 8
ENDINGS = 4
_SENTENCE_ENDS = (".", "!", "?", '."', "!”", ".”", ".)")


def generate_items(
    text: str,
    *,
    count: int,
    seed: int,
    context_words: int = CONTEXT_WORDS,
    ending_words: int = ENDING_WORDS,
    endings: int = ENDINGS,
) -> tuple[Item, ...]:
    """`count` items from non-overlapping passages of `text`.

    Each passage begins at a sentence; its first `context_words` words are the context, the next
    `ending_words` the correct ending. Wrong endings are those of other passages, of equal length in
    words. Labels are evenly distributed. The same arguments give the same items. Raises
    `ConfigError` if the text has too few passages.
    """
    passages = _passages(text.split(), context_words, ending_words)
    distinct = list(dict.fromkeys(ending for _, ending in passages))
    if len(passages) < count or len(distinct) < endings:
        raise ConfigError(
            f"the text has room for {len(passages)} multiple-choice items, {count} are asked for: "
            "give a longer --text or fewer --items"
        )
    rng = random.Random(seed)
    labels = [index % endings for index in range(count)]
    rng.shuffle(labels)
    items = []
    for (context, real), label in zip(rng.sample(passages, count), labels, strict=True):
        # One more than needed, since the correct one may be among them.
        drawn = rng.sample(distinct, endings)
        wrong = [ending for ending in drawn if ending != real][: endings - 1]
        choices = (*wrong[:label], real, *wrong[label:])
        items.append(Item(context=context, endings=choices, label=label))
    return tuple(items)


def count_room(text: str) -> int:
    """The number of items that `generate_items` can make of `text` at the default lengths."""
    passages = _passages(text.split(), CONTEXT_WORDS, ENDING_WORDS)
    return len(passages) if len({ending for _, ending in passages}) >= ENDINGS else 0


def _passages(words: Sequence[str], context_words: int, ending_words: int) -> list[tuple[str, str]]:
    length = context_words + ending_words
    passages, at = [], 0
    while at + length <= len(words):
        if at == 0 or words[at - 1].endswith(_SENTENCE_ENDS):
            middle = at + context_words
            passages.append((" ".join(words[at:middle]), " ".join(words[middle : at + length])))
            at += length
        else:
            at += 1
    return passages
