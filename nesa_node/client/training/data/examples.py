"""Training examples: the tokens of a text, and which of them are learned.

N tokens of an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from nesa_node.core.errors import ConfigError

IGNORED = -100
"""Label of a position without loss, as in torch's cross entropy."""
_ANCHORS = ("\n", "=", "0")
"""Stand before a text that continues another one: some tokenizers add a space to a first word. The
first one whose tokens do not join with the text's is taken away again."""


@dataclass(frozen=True, slots=True)
class SupervisedText:
    """A text, and what a model learns of it."""

    text: str
    targets: tuple[tuple[int, int], ...]
    """Half-open ranges of characters, ascending and disjoint, whose tokens are learned."""
    is_rendered: bool
    """Whether a chat template wrote its special tokens. Else the tokenizer's first ones and the end
    of the sequence are added, and the end is learned."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingExample:
    """Tokens with labels, which are not shifted: the label of a position is its own token."""

    ids: NDArray[np.int32]
    """Shape [N]."""
    labels: NDArray[np.int32]
    """Shape [N]; `IGNORED` where no loss is computed."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        """Tokens that are learned. The first one is not: no token predicts it."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED))

    def cut(self, max_length: int) -> TrainingExample:
        """Its first `max_length` tokens; a copy, so that the rest does not stay in memory."""
        return TrainingExample(self.ids[:max_length].copy(), self.labels[:max_length].copy())


class ExampleTokenizer:
    """Tokenizer of supervised texts. No token contains both what is learned and what is not.

    A text has the tokens that it has as a whole if those of its beginnings, each up to where
    learning starts or stops, begin it. Else the parts between are tokenized one by one: a model
    that is given a prompt is given the tokens that it was trained on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._first_ids = _find_first_ids(tokenizer)

    def tokenize(self, texts: Sequence[SupervisedText]) -> list[TrainingExample]:
        """Examples of `texts`, in order and of any length.

        Raises `ConfigError` if a text needs an end of the sequence that the tokenizer lacks.
        """
        parts = [_split(text) for text in texts]
        tokens = self._encode_parts([[text for text, _ in each] for each in parts])
        return [
            self._make_example(text, [learned for _, learned in each], ids)
            for text, each, ids in zip(texts, parts, tokens, strict=True)
        ]

    def _make_example(
        self, text: SupervisedText, learned: Sequence[bool], tokens: Sequence[Sequence[int]]
    ) -> TrainingExample:
        runs = list(zip(tokens, learned, strict=True))
        if not text.is_rendered:
            end = self._tokenizer.eos_token_id
            if end is None:
                raise ConfigError(
                    "the tokenizer has no token for the end of a sequence, which a text and a "
                    "completion end in: set eos_token in its tokenizer_config.json"
                )
            has_end = bool(tokens) and bool(tokens[-1]) and tokens[-1][-1] == end
            runs = [(self._first_ids, False), *runs, ([] if has_end else [end], True)]
        ids = np.concatenate([np.asarray(run, dtype=np.int32) for run, _ in runs])
        mask = np.repeat([is_learned for _, is_learned in runs], [len(run) for run, _ in runs])
        return TrainingExample(ids, np.where(mask, ids, np.int32(IGNORED)))

    def _encode_parts(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Tokens of each part of each text."""
        encoded = dict(enumerate(self._encode_nested(texts)))
        divided = [index for index, parts in enumerate(texts) if len(parts) > 1]
        wholes = self._encode(["".join(texts[index]) for index in divided])
        different = {
            index: whole
            for index, whole in zip(divided, wholes, strict=True)
            if [token for part in encoded[index] for token in part] != whole
        }
        encoded |= self._cut_wholes(texts, different)
        return [encoded[index] for index in range(len(texts))]

    def _cut_wholes(
        self, texts: Sequence[Sequence[str]], wholes: Mapping[int, list[int]]
    ) -> dict[int, list[list[int]]]:
        """Tokens of the parts of some texts, by the index of the text, from the whole's tokens."""
        begins = self._encode_nested([list(accumulate(texts[index]))[:-1] for index in wholes])
        cut: dict[int, list[list[int]]] = {}
        for (index, whole), prefixes in zip(wholes.items(), begins, strict=True):
            ends = [0, *map(len, prefixes), len(whole)]
            if all(prefix == whole[: len(prefix)] for prefix in prefixes) and ends == sorted(ends):
                cut[index] = [whole[start:end] for start, end in pairwise(ends)]
        uncut = [index for index in wholes if index not in cut]
        continued = self._encode_continued([texts[index] for index in uncut])
        return cut | dict(zip(uncut, continued, strict=True))

    def _encode_continued(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Tokens of each part of each text, of which only the first part begins a text.

        A part that the tokenizer joins with all anchors is tokenized as if it began a text.
        """
        encoded = self._encode_nested(texts)
        joined = [(row, at) for row, parts in enumerate(texts) for at in range(1, len(parts))]
        for anchor in _ANCHORS:
            [before] = self._encode([anchor])
            parts = self._encode([anchor + texts[row][at] for row, at in joined])
            left = []
            for (row, at), part in zip(joined, parts, strict=True):
                if part[: len(before)] == before:
                    encoded[row][at] = part[len(before) :]
                else:
                    left.append((row, at))
            joined = left
        return encoded

    def _encode_nested(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        tokens = iter(self._encode([text for each in texts for text in each]))
        return [[next(tokens) for _ in each] for each in texts]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text, without the tokenizer's first and last ones."""
        if not texts:
            return []
        encode = cast(Callable[..., Any], self._tokenizer)
        ids: list[list[int]] = encode(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # texts may be longer than the model's context: they are cut later
        )["input_ids"]
        return ids


def _find_first_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Special tokens that the tokenizer puts before each text."""
    encode = cast(Callable[..., Any], tokenizer)
    full: list[int] = encode(_ANCHORS[0])["input_ids"]
    plain: list[int] = encode(_ANCHORS[0], add_special_tokens=False)["input_ids"]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def _split(text: SupervisedText) -> list[tuple[str, bool]]:
    """Consecutive parts, and whether each is learned. None is empty, unless it is the only one."""
    edges = [0, *(edge for target in text.targets for edge in target), len(text.text)]
    parts = [
        (text.text[start:end], bool(number % 2))
        for number, (start, end) in enumerate(pairwise(edges))
        if start < end
    ]
    return parts or [("", False)]
