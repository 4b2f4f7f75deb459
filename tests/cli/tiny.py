"""A model folder small enough for tests of the command line, tokenizer and template included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ["<end>", "<unknown>", "system", "user", "assistant", "hello", "again", "the", "capital"]
VOCABULARY = 64
BLOCKS = 4


def write_tiny_model(folder: Path) -> Path:
    """A Llama of 4 blocks with fixed random weights in `folder`, which is created."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # As initialised, a random model repeats one token.
            parameter.mul_(8)
    model.save_pretrained(folder)
    words = WORDS + [f"w{index}" for index in range(VOCABULARY - len(WORDS))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    fast = make(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder
