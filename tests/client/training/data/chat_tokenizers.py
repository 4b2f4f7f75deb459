"""Small tokenizers with the chat templates that model families have, in short."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BEGIN, END, TURN, TURN_END = "<begin>", "<end>", "<|im_start|>", "<|im_end|>"
_TEXT = [
    "the cat sat on the mat, and the dog sat on the log.",
    'She said: "hello there", and then they were there again!\n\nAnswer: yes',
    "system user assistant tool think",
] * 4

MARKED_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = re.sub(r"\{% (end)?generation %\}", "", MARKED_CHATML)
"""Of Qwen 2 and SmolLM."""
PLAIN_WORDS = (
    "{% for m in messages %}{{ m.role|capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Without special tokens; the prompt for an answer ends before the space."""
EMPTY_THOUGHT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content|trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Of Qwen 3: only the last answer has a thought."""
SYSTEM_IN_LAST = (
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + ' ' %}"
    "{% elif m.role == 'user' %}[INST]"
    "{% if loop.last or (loop.index == messages|length - 1) %}{{ ns.system }}{% endif %}"
    "{{ m.content }}[/INST]{% else %}{{ ' ' + m.content }}<end>{% endif %}{% endfor %}"
)
"""Of Mistral: the system's message stands in the user's last one."""
REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not\nsupported') }}"
    "{% endif %}" + CHATML
)
"""Of Gemma."""
WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools|tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(
    template: str | None = CHATML, *, begin: bool = False, end: bool = True
) -> PreTrainedTokenizerBase:
    """Byte-level, so that every text has tokens; `begin`: the first token of each text is one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[BEGIN, END, TURN, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)]
        )
    make: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerBase = make(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END if end else None
    )
    made.chat_template = template
    return made


def make_spaced_tokenizer(
    scheme: Literal["first", "always"] = "first",
) -> PreTrainedTokenizerBase:
    """Like Llama 2's: a space is put before a text, and belongs to the word after it.

    "always": before what follows a special token, too.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trained.train_from_iterator(
        _TEXT, trainers.BpeTrainer(vocab_size=100, special_tokens=[END], show_progress=False)
    )
    learned = json.loads(trained.to_str())["model"]
    tokens = [*learned["vocab"], *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [(first, second) for first, second in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    make: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerBase = make(tokenizer_object=tokenizer, eos_token=END)
    return made
