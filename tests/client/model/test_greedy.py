"""Greedy texts of one row are decoded without the caller's thread, and are the same as with it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.head import argmax_allowed
from nesa_node.client.model.inference_session import InferenceSession, StopCondition
from nesa_node.client.model.loop_thread import Interrupt
from nesa_node.core.errors import ContextLengthError, MissingBlocksError
from nesa_node.engine.model.embedder_and_head import load_embedder_and_head
from nesa_node.engine.weights.hub import open_checkpoint
from tests.client.local_models import left_padded, local_model, random_ids
from tests.client.test_lifecycle import ScriptedConnection, scripted_model
from tests.engine.tiny_models import FAMILIES, reference
from tests.same_tokens import assert_same_tokens

Pair = tuple[DistributedModelForCausalLM, PreTrainedModel]


@pytest.fixture(scope="module")
def pair(tiny: Callable[[str], Path]) -> Iterator[Pair]:
    with local_model(tiny("llama")) as model:
        yield model, reference(tiny("llama"))


@pytest.fixture
def continued(monkeypatch: pytest.MonkeyPatch) -> list[StopCondition]:
    """What sessions were asked to go on until, by themselves."""
    endings: list[StopCondition] = []
    greedy = InferenceSession.generate_greedy

    def note(self: InferenceSession, ids_L: torch.Tensor, ending: StopCondition) -> Any:
        endings.append(ending)
        return greedy(self, ids_L, ending)

    monkeypatch.setattr(InferenceSession, "generate_greedy", note)
    return endings


class Collect(BaseStreamer):
    """Raises with the token number `fail_at`, from 1."""

    def __init__(self, fail_at: int = 0) -> None:
        self.tokens: list[int] = []
        self._fail_at = fail_at
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.tokens.extend(value.tolist())
        if len(self.tokens) == self._fail_at:
            raise OSError("the terminal is gone")

    def end(self) -> None:
        pass


def plain(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    text: list[int] = model.generate(ids, max_new_tokens=count, do_sample=False)[0].tolist()
    return text[ids.shape[1] :]


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 40},
        {"max_length": 30},
        {"ends": [4], "max_new_tokens": 24},
        {"ends": [0], "max_new_tokens": 24},
        {"ends": [9, 3], "max_new_tokens": 24},
        {"ends": [2, 5], "max_new_tokens": 24, "min_new_tokens": 9},
        {"ends": [2, 5], "max_new_tokens": 24, "min_length": 20},
        {"ends": [6], "max_new_tokens": 24, "min_length": 14, "min_new_tokens": 7},
    ],
    ids=lambda options: "-".join(f"{key}{value}" for key, value in options.items()),
)
def test_the_tokens_equal_those_of_transformers(
    pair: Pair, continued: list[StopCondition], options: dict[str, Any]
) -> None:
    model, alone = pair
    ids = random_ids(1, 12, seed=1)
    options = {"do_sample": False, **options}
    if (ends := options.pop("ends", None)) is not None:
        text = plain(model, ids, 24)
        options |= {"eos_token_id": [text[at] for at in ends], "pad_token_id": 0}
    ours = model.generate(ids, **options)
    assert continued
    assert_same_tokens(alone, ours, ids, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"repetition_penalty": 1.2},
        {"num_return_sequences": 2, "do_sample": True},
        {"num_beams": 2},
        {"return_dict_in_generate": True},
        {"max_time": 60.0},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_is_more_than_greedy_is_left_to_transformers(
    pair: Pair, continued: list[StopCondition], options: dict[str, Any]
) -> None:
    model, _ = pair
    model.generate(random_ids(1, 5), max_new_tokens=6, **options)
    assert not continued


def test_a_padded_row_goes_on_at_its_own_position(
    pair: Pair, continued: list[StopCondition]
) -> None:
    model, alone = pair
    ids, mask = left_padded([5], seed=3)
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 6, dtype=torch.long), mask], 1)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    ours = model.generate(padded, attention_mask=mask, **options)
    assert continued
    assert_same_tokens(alone, ours, padded, mask, **options)


def test_a_session_goes_on_with_the_next_turn(pair: Pair, continued: list[StopCondition]) -> None:
    model, alone = pair
    ids = random_ids(1, 7, seed=5)
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    with model.inference_session(max_length=64) as session:
        first = model.generate(ids, session=session, **options)
        assert session.lengths == (7 + 8,)
        longer = torch.cat([first, random_ids(1, 4, seed=6)], 1)
        second = model.generate(longer, session=session, **options)
        assert session.tokens_sent == 7 + 8 + 1 + 4 + 8
    assert len(continued) == 2
    assert_same_tokens(alone, second, longer, **options)


@pytest.mark.parametrize("fail_at", [1, 2, 9, 16])
def test_what_was_decoded_ahead_of_a_caller_who_left_is_forgotten(pair: Pair, fail_at: int) -> None:
    model, _ = pair
    ids = random_ids(1, 8, seed=2)
    text = plain(model, ids, 16)
    with model.inference_session(max_length=48) as session:
        streamer = Collect(fail_at)
        with pytest.raises(OSError, match="terminal"):
            model.generate(
                ids, session=session, max_new_tokens=16, do_sample=False, streamer=streamer
            )
        assert streamer.tokens == text[:fail_at]
        assert session.token_ids == ((*ids[0].tolist(), *text[: fail_at - 1]),)
        again = model.generate(ids, session=session, max_new_tokens=16, do_sample=False)
        assert again[0, 8:].tolist() == text


def test_a_session_is_not_decoded_far_ahead_of_a_caller_who_looks_slowly(pair: Pair) -> None:
    model, _ = pair
    ids = random_ids(1, 8, seed=2)
    ahead: list[int] = []
    with model.inference_session(max_length=48) as session:
        text = []
        for token in session.generate_greedy(ids[0], StopCondition(max_tokens=20)):
            text.append(token)
            if len(text) % 5 == 0:
                time.sleep(0.1)
                ahead.append(session.lengths[0] - 8 - len(text))
    assert text == plain(model, ids, 20)
    assert max(ahead) <= 2
    assert ahead[0] > 0


def test_many_threads_get_their_own_tokens_from_few_readings_of_the_head(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, alone = pair
    head, sizes = model.ends.head._compute, []

    def counted(hidden_TD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_TD))
        return head(hidden_TD)

    batcher = model.ends.head
    prompts = [random_ids(1, 4 + number, seed=number) for number in range(12)]
    batcher._compute = counted
    try:
        with ThreadPoolExecutor(12) as pool:
            texts = list(pool.map(lambda ids: plain(model, ids, 40), prompts))
    finally:
        batcher._compute = head
    assert max(sizes) > 1
    assert sum(sizes) == 12 * 40
    for ids, text in zip(prompts, texts, strict=True):
        whole = torch.cat([ids, torch.tensor([text])], 1)
        assert_same_tokens(alone, whole, ids, max_new_tokens=40, do_sample=False)


def test_more_than_the_session_holds_is_refused_before_anything_is_sent(pair: Pair) -> None:
    model, _ = pair
    with model.inference_session(max_length=10) as session:
        session.step(random_ids(1, 4))
        two = torch.tensor([5, 9])
        with pytest.raises(ContextLengthError, match="larger max_length"):
            next(session.generate_greedy(two, StopCondition(max_tokens=6)))
        assert session.lengths == (4,)
        assert len(list(session.generate_greedy(two, StopCondition(max_tokens=5)))) == 5
        assert session.lengths == (10,)
    both = model.inference_session(max_length=10, batch_size=2)
    with both, pytest.raises(ValueError, match="2 rows"):
        next(both.generate_greedy(torch.tensor([5]), StopCondition(max_tokens=2)))


def test_an_error_of_a_later_step_reaches_the_caller_and_closes_the_session(
    tiny: Callable[[str], Path],
) -> None:
    steps = iter(range(100))

    def fail() -> None:
        if next(steps) == 3:
            raise MissingBlocksError([(2, 4)], "no node holds blocks 2:4")

    connection, streamer = ScriptedConnection(fail), Collect()
    with scripted_model(tiny("llama"), connection) as model:
        with pytest.raises(MissingBlocksError, match="2:4"):
            model.generate(random_ids(1, 4), max_new_tokens=9, do_sample=False, streamer=streamer)
        assert len(streamer.tokens) == 3
        assert connection.sessions[0].events == ["step"] * 4 + ["closed"]


@pytest.mark.parametrize("by", ["signal", "interrupt"])
def test_an_interrupt_cancels_a_later_step(tiny: Callable[[str], Path], by: str) -> None:
    running, interrupt, steps = threading.Event(), Interrupt(), iter(range(100))

    async def step() -> None:
        if next(steps) == 3:
            running.set()
            await asyncio.sleep(60)

    def end_it() -> None:
        running.wait(10)
        if by == "signal":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            interrupt.set()

    connection = ScriptedConnection(step)
    with scripted_model(tiny("llama"), connection) as model:
        thread = threading.Thread(target=end_it)
        thread.start()
        session = model.inference_session(max_length=20, interrupt=interrupt)
        with pytest.raises(KeyboardInterrupt if by == "signal" else CancelledError):
            model.generate(random_ids(1, 4), session=session, max_new_tokens=9, do_sample=False)
        thread.join()
        assert session.closed
        assert connection.sessions[0].events == ["step"] * 4 + ["cancelled", "closed"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_of_several_rows_are_embedded_as_each_by_itself(
    tiny: Callable[[str], Path], family: str
) -> None:
    folder = tiny(family)
    checkpoint = open_checkpoint(str(folder), cache_dir=folder)
    embedder, _ = load_embedder_and_head(checkpoint, dtype=torch.float32, device="cpu")
    ids, positions = torch.tensor([7, 3, 300]), torch.tensor([0, 41, 2])
    each = [embedder(ids[row : row + 1], int(positions[row])) for row in range(3)]
    assert torch.equal(embedder.embed_rows(ids, positions), torch.cat(each))
    with pytest.raises(ContextLengthError):
        embedder.embed_rows(ids, torch.tensor([0, 0, checkpoint.context_length]))
    with pytest.raises(ValueError, match="token ids"):
        embedder.embed_rows(torch.tensor([0, 1, embedder.vocab_size]), positions)


def test_the_likeliest_is_found_among_those_that_are_not_banned() -> None:
    scores = torch.tensor([0.1, 3.0, -1.0, 3.0, 2.0])
    assert argmax_allowed(scores, frozenset()) == int(scores.argmax())
    assert argmax_allowed(scores, frozenset({1, 3})) == 4
    assert argmax_allowed(scores, frozenset({0})) == int(scores.argmax())
    assert scores.tolist() == pytest.approx([0.1, 3.0, -1.0, 3.0, 2.0])
