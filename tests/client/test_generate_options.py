"""The options of transformers' `generate` mean here what they mean there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from nesa_node.client.model.auto import load_generation_config
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.engine.weights.hub import open_checkpoint
from tests.client.local_models import left_padded, local_model, random_ids
from tests.engine.tiny_models import VOCABULARY, reference
from tests.same_tokens import assert_same_tokens

Pair = tuple[DistributedModelForCausalLM, PreTrainedModel]


@pytest.fixture(scope="module")
def pair(tiny: Callable[[str], Path]) -> Iterator[Pair]:
    with local_model(tiny("llama")) as model:
        yield model, reference(tiny("llama"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.05},
        {"typical_p": 0.9},
        {"repetition_penalty": 1.3},
        {"num_return_sequences": 3},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_sampling_with_a_seed_equals_that_of_transformers(
    pair: Pair, options: dict[str, Any]
) -> None:
    model, alone = pair
    ids = random_ids(1, 12)
    options = {"do_sample": True, "max_new_tokens": 32, **options}
    torch.manual_seed(7)
    ours = model.generate(ids, **options)
    assert_same_tokens(alone, ours, ids, seed=7, **options)


def test_sampled_padded_batch_with_several_sequences_equals_that_of_transformers(
    pair: Pair,
) -> None:
    model, alone = pair
    ids, mask = left_padded([4, 13, 9])
    options: dict[str, Any] = {
        "do_sample": True,
        "max_new_tokens": 24,
        "num_return_sequences": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(3)
    ours = model.generate(ids, attention_mask=mask, **options)
    assert ours.shape == (6, 13 + 24)
    assert_same_tokens(alone, ours, ids, mask, seed=3, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [6, 7]]},
        {"min_new_tokens": 10, "eos_token_id": 3, "pad_token_id": 3},
        {"suppress_tokens": [1, 2, 3]},
        {"prefill_chunk_size": 4},
        {"use_cache": False},
        {"max_length": 30},
        {"prefix_allowed_tokens_fn": lambda _batch, ids: [int(ids[-1] * 7 + 1) % VOCABULARY, 9]},
    ],
    ids=lambda options: "-".join(options),
)
def test_greedy_options_equal_those_of_transformers(pair: Pair, options: dict[str, Any]) -> None:
    model, alone = pair
    ids = random_ids(2, 12, seed=1)
    options = {"do_sample": False, **options}
    options.setdefault("max_new_tokens", None if "max_length" in options else 24)
    ours = model.generate(ids, **options)
    options.pop("use_cache", None)
    assert_same_tokens(alone, ours, ids, **options)


def test_rows_that_end_early_are_padded_as_transformers_does(pair: Pair) -> None:
    model, alone = pair
    ids, mask = left_padded([6, 15, 10], seed=4)
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "do_sample": False,
        "eos_token_id": [int(plain[0, 15 + 4]), int(plain[1, 15 + 9])],
        "pad_token_id": 0,
    }
    ours = model.generate(ids, attention_mask=mask, **options)
    assert_same_tokens(alone, ours, ids, mask, **options)
    assert ours[0, -1] == 0


def test_logits_processors_and_stopping_criteria_are_called(pair: Pair) -> None:
    class OnlyEven(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores[:, 1::2] = -torch.inf
            return scores

    class AtMost(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 20)

    model, alone = pair
    ids = random_ids(1, 8)
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "do_sample": False,
        "logits_processor": LogitsProcessorList([OnlyEven()]),
        "stopping_criteria": StoppingCriteriaList([AtMost()]),
    }
    ours = model.generate(ids, **options)
    assert ours.shape[1] == 20
    assert not bool((ours[0, 8:] % 2).any())
    assert_same_tokens(alone, ours, ids, **options)


def test_streamer_is_given_the_prompt_and_each_token(pair: Pair) -> None:
    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.parts: list[torch.Tensor] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.parts.append(value.flatten())

        def end(self) -> None:
            self.ended = True

    model, _ = pair
    ids = random_ids(1, 8)
    streamer = Collect()
    ours = model.generate(ids, max_new_tokens=10, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert len(streamer.parts) == 11
    assert torch.equal(torch.cat(streamer.parts), ours[0])


def test_stop_strings_end_the_text(pair: Pair) -> None:
    model, alone = pair
    # transformers' criterion tries its tokenizer on the word "abcdef".
    words = {f"w{index}": index for index in range(1, VOCABULARY)} | {"abcdef": 0}
    plain = Tokenizer(WordLevel(words, unk_token="abcdef"))
    plain.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)  # type: ignore[no-untyped-call]
    ids = random_ids(1, 8)
    free = model.generate(ids, max_new_tokens=24, do_sample=False)
    stop = f"w{int(free[0, 8 + 6])}"
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "do_sample": False,
        "stop_strings": [stop],
        "tokenizer": tokenizer,
    }
    ours = model.generate(ids, **options)
    assert ours.shape[1] < free.shape[1]
    assert_same_tokens(alone, ours, ids, **options)


def test_scores_and_logits_are_returned_as_transformers_returns_them(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(2, 9)
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.2,
    }
    ours = model.generate(ids, **options)
    theirs: Any = alone.generate(ids, **options)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.past_key_values is None
    for name in ("scores", "logits"):
        for mine, reference_BV in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            assert (mine - reference_BV).abs().max() <= 1e-4 * reference_BV.abs().max()


def test_generation_config_object_is_used(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(1, 9)
    config = GenerationConfig.from_dict({"max_new_tokens": 7, "repetition_penalty": 1.4})
    ours = model.generate(ids, generation_config=config)
    assert ours.shape[1] == 16
    assert_same_tokens(alone, ours, ids, max_new_tokens=7, do_sample=False, repetition_penalty=1.4)


def test_generation_config_of_the_folder_is_honoured(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in tiny("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stated = {
        "eos_token_id": [11, 12],
        "pad_token_id": 4,
        "cache_implementation": "static",
        "do_sample": True,
        "top_k": 3,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    config = load_generation_config(open_checkpoint(str(tmp_path), cache_dir=tmp_path))
    assert (config.eos_token_id, config.pad_token_id, config.top_k) == ([11, 12], 4, 3)
    assert config.cache_implementation is None


@pytest.mark.parametrize("how", ["prompt_lookup", "assistant"])
def test_assisted_generation_rolls_rejected_tokens_back(
    pair: Pair, tiny: Callable[[str], Path], how: str
) -> None:
    model, alone = pair
    ids = random_ids(1, 6).repeat(1, 4)
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
    if how == "prompt_lookup":
        ours = model.generate(ids, prompt_lookup_num_tokens=4, **options)
    else:
        ours = model.generate(ids, assistant_model=reference(tiny("mistral")), **options)
    assert_same_tokens(alone, ours, ids, **options)


def test_threads_generate_at_the_same_time_each_its_own_tokens(pair: Pair) -> None:
    model, alone = pair
    prompts = [random_ids(1, 5 + index, seed=index) for index in range(4)]
    results: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        results[index] = model.generate(prompts[index], max_new_tokens=16, do_sample=False)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, ids in enumerate(prompts):
        assert_same_tokens(alone, results[index], ids, max_new_tokens=16, do_sample=False)


@pytest.mark.parametrize("new_tokens", [12, 13, 15])
def test_candidates_beyond_the_last_new_token_have_room(pair: Pair, new_tokens: int) -> None:
    """A prompt that repeats itself has as many candidates as are asked for, to the very end."""
    model, local = pair
    alone: Any = local
    ids = random_ids(1, 12, seed=19).repeat(1, 6)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    ours = model.generate(ids, prompt_lookup_num_tokens=8, **options)
    assert torch.equal(ours, alone.generate(ids, **options))
