"""Small tokenizers of the kinds that models have, with 320 tokens like the tiny models."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.engine.tiny_models import VOCABULARY

END = "<end>"
_TEXT = [
    "the cat sat on the mat, and the dog sat on the log.",
    'She said: "hello there", and then they were there again!',
    'there are other letters here: {"name": "other", "age": 12}',
] * 4


def byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """Like GPT-2's, Llama 3's or SmolLM's: every text has tokens, characters may have several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return _fast(tokenizer)


def metaspace_tokenizer() -> PreTrainedTokenizerBase:
    """Like Llama 2's: the space before a text is stripped, unknown characters become bytes."""
    words = ["▁the", "▁cat", "▁sat", "▁", "s", "a", "t", "he", "▁hello", ",", "."]
    tokens = [END, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return _fast(tokenizer)


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    make: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerBase = make(tokenizer_object=tokenizer, eos_token=END)
    return fast
