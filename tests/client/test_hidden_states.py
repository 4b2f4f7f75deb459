"""`output_hidden_states`: what transformers' models return, over nodes of two blocks each.

B rows, L columns, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.generation import SessionCache
from nesa_node.client.model.layers import LocalConnection, selected_indices
from nesa_node.core.errors import ContextLengthError, UnsupportedFeatureError
from tests.client.local_models import left_padded, local_model, random_ids
from tests.engine.tiny_models import BLOCKS, POSITIONS, reference

Pair = tuple[DistributedModelForCausalLM, PreTrainedModel]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Iterator[Pair]:
    folder = tiny(request.param)
    with local_model(folder) as model:
        yield model, reference(folder)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, mask_BL: torch.Tensor) -> None:
    """Within 1e-4 where the mask shows columns, zeros elsewhere."""
    assert ours.shape == theirs.shape
    shown = mask_BL != 0
    assert (ours[shown] - theirs[shown]).abs().max() <= 1e-4 * theirs[shown].abs().max()
    assert not ours[~shown].any()


def forward_alone(alone: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> Any:
    positions = (mask_BL.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return alone(
            ids_BL, attention_mask=mask_BL, position_ids=positions, output_hidden_states=True
        )


@pytest.mark.parametrize("side", ["left", "right"])
def test_those_of_a_padded_batch_equal_transformers(pair: Pair, side: str) -> None:
    model, alone = pair
    ids_BL, mask_BL = left_padded([5, 17, 11])
    if side == "right":
        ids_BL, mask_BL = ids_BL.flip(1), mask_BL.flip(1)
    theirs = forward_alone(alone, ids_BL, mask_BL)
    ours = model(ids_BL, attention_mask=mask_BL, logits_to_keep=2, output_hidden_states=True)
    for mine, expected in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert_close(mine, expected, mask_BL)
    assert_close(ours.logits, theirs.logits[:, -2:], mask_BL[:, -2:])


def test_they_are_part_of_the_tuple_and_may_be_changed(pair: Pair) -> None:
    model, alone = pair
    ids_BL = random_ids(1, 9)
    logits, states = model(ids_BL, output_hidden_states=True, return_dict=False)
    theirs = forward_alone(alone, ids_BL, torch.ones_like(ids_BL))
    assert_close(logits, theirs.logits, torch.ones_like(ids_BL))
    for state in states:
        state += 1
    assert model(ids_BL).hidden_states is None


def test_a_config_may_ask_for_them(pair: Pair) -> None:
    model, _ = pair
    model.config.output_hidden_states = True
    try:
        assert len(model(random_ids(1, 3)).hidden_states) == BLOCKS + 1
        assert model(random_ids(1, 3), output_hidden_states=False).hidden_states is None
        model.generate(random_ids(1, 3), max_new_tokens=2)
    finally:
        model.config.output_hidden_states = False


@pytest.mark.parametrize("client_blocks", [(0, 0), (1, 2), (6, 0)])
def test_only_what_is_wanted_has_a_session_of_its_own_one_at_a_time(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, client_blocks: tuple[int, int]
) -> None:
    """Two sessions at once could each hold the room that the other waits for."""
    opened, now = [], [0]
    open_session = LocalConnection.open_session

    def watched(self: LocalConnection, span: Any, **options: Any) -> Any:
        opened.append(span)
        context: Any = open_session(self, span, **options)
        enter, leave = context.__aenter__, context.__aexit__

        class Watched:
            async def __aenter__(self) -> Any:
                now[0] += 1
                assert now[0] == 1
                return await enter()

            async def __aexit__(self, *error: Any) -> Any:
                now[0] -= 1
                return await leave(*error)

        return Watched()

    folder = tiny("llama")
    ids_BL = random_ids(2, 7)
    theirs = forward_alone(reference(folder), ids_BL, torch.ones_like(ids_BL)).hidden_states
    with local_model(folder, client_blocks=client_blocks) as model:
        monkeypatch.setattr(LocalConnection, "open_session", watched)
        states = model(ids_BL, output_hidden_states=[0, 3, -1]).hidden_states
        own = {0, *(cut for cut in (client_blocks[0], 6 - client_blocks[1]) if 0 < cut < 6)}
        assert [span.start for span in opened] == sorted(own | {3})
        for index, state in enumerate(states):
            if index in (0, 3, BLOCKS):
                assert_close(state, theirs[index], torch.ones_like(ids_BL))
            else:
                assert state is None
        opened.clear()
        assert model(ids_BL, output_hidden_states=True).hidden_states[5] is not None
        assert [(span.start, span.end) for span in opened] == [(i, i + 1) for i in range(BLOCKS)]


def test_indices_are_those_of_transformers() -> None:
    assert selected_indices(True, 3) == {0, 1, 2, 3}
    assert selected_indices(None, 3) == selected_indices(False, 3) == frozenset()
    assert selected_indices([-1, 0], 3) == {0, 3}
    assert selected_indices(-2, 3) == {2}
    for wrong in (4, -5, [1, 9]):
        with pytest.raises(ValueError, match="use 0 to 3"):
            selected_indices(wrong, 3)


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "num_return_sequences": 2}], ids=str
)
def test_those_of_a_generated_text_equal_transformers(pair: Pair, options: dict[str, Any]) -> None:
    """Step by step: the prompt's columns, then one for each new token that was fed."""
    model, alone = pair
    ids_BL, mask_BL = left_padded([4, 9])
    options = {
        **options,
        "attention_mask": mask_BL,
        "max_new_tokens": 6,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    }
    torch.manual_seed(1)
    ours = model.generate(ids_BL, **options)
    torch.manual_seed(1)
    generate: Any = alone.generate
    theirs = generate(ids_BL, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.hidden_states) == len(theirs.hidden_states) == 6
    rows = mask_BL.repeat_interleave(options.get("num_return_sequences", 1), dim=0)
    for step, (mine, expected) in enumerate(
        zip(ours.hidden_states, theirs.hidden_states, strict=True)
    ):
        shown = rows if step == 0 else rows[:, -1:]
        for state, expected_state in zip(mine, expected, strict=True):
            assert_close(state, expected_state, shown)
    assert ours.past_key_values is None


def test_without_a_dict_generate_ignores_them_as_transformers_does(pair: Pair) -> None:
    model, _ = pair
    ids_BL = random_ids(1, 4)
    plain = model.generate(ids_BL, max_new_tokens=3)
    assert torch.equal(model.generate(ids_BL, max_new_tokens=3, output_hidden_states=True), plain)


def test_what_cannot_be_had_is_refused_before_anything_is_sent(pair: Pair) -> None:
    model, _ = pair
    ids_BL = random_ids(1, 4)
    with model.inference_session(8) as session:
        with pytest.raises(UnsupportedFeatureError, match="with the whole text"):
            model(ids_BL, past_key_values=SessionCache(session), output_hidden_states=True)
        assert session.position == 0
    with pytest.raises(ContextLengthError):
        model(random_ids(1, POSITIONS + 1), output_hidden_states=True)
    with pytest.raises(ValueError, match="has 3 columns"):
        model(ids_BL, attention_mask=torch.ones(1, 3), output_hidden_states=True)
    with pytest.raises(ValueError, match="no tokens"):
        model(ids_BL[:, :0], output_hidden_states=True)
    with pytest.raises(ValueError, match="7 hidden states"):
        model(ids_BL, output_hidden_states=9)
