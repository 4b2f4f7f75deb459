"""One answer's text, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerBase

from nesa_node.api.generation.decode_loop import ChoiceDecoder, Vocabulary
from nesa_node.api.generation.job import Delta, Job, SequenceToken
from nesa_node.api.generation.sampler import SharedLogitsState
from tests.api.tokenizers import byte_level_tokenizer, metaspace_tokenizer


def choice_of(job: Job, vocabulary: Vocabulary) -> ChoiceDecoder:
    return ChoiceDecoder(job, 0, vocabulary, None, SharedLogitsState(job.sampling, job.prompt))


@pytest.mark.parametrize("make", [byte_level_tokenizer, metaspace_tokenizer])
def test_a_character_that_the_limit_cuts_is_left_out(
    make: Callable[[], PreTrainedTokenizerBase],
) -> None:
    tokenizer = make()
    load: Any = GenerationConfig
    vocabulary = Vocabulary(tokenizer, load(), vocab_size=len(tokenizer))
    text = "the cat 🙂"
    token_ids = tokenizer(text).input_ids
    for count in range(1, len(token_ids) + 1):
        job = Job(prompt=(1,), max_tokens=count)
        choice = choice_of(job, vocabulary)
        told: list[Delta] = [
            choice.append_token(SequenceToken(one, b"", 0.0)) for one in token_ids[:count]
        ]
        assert told[-1].finish_reason == "length"
        said = "".join(delta.text for delta in told)
        assert text.startswith(said)
        assert (said == text) == (count == len(token_ids))
    # What the model itself ended stays as it is.
    choice = choice_of(Job(prompt=(1,), max_tokens=99), vocabulary)
    ended = [*token_ids[:-1], tokenizer.eos_token_id]
    said = "".join(choice.append_token(SequenceToken(one, b"", 0.0)).text for one in ended)
    assert said.endswith("\ufffd")
