"""Sessions step by step, and `generate` that continues them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.generation import SessionCache
from nesa_node.core.errors import ContextLengthError, UnsupportedFeatureError
from nesa_node.core.ids import Span
from tests.client.local_models import left_padded, local_model, random_ids
from tests.engine.tiny_models import BLOCKS, POSITIONS, reference
from tests.same_tokens import assert_same_tokens

Pair = tuple[DistributedModelForCausalLM, PreTrainedModel]


@pytest.fixture(scope="module")
def pair(tiny: Callable[[str], Path]) -> Iterator[Pair]:
    with local_model(tiny("gpt2")) as model:
        yield model, reference(tiny("gpt2"))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    forward: Any = model.__call__
    with torch.no_grad():
        result: torch.Tensor = forward(ids).logits
    return result


def test_steps_give_the_logits_of_one_forward(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(2, 20)
    with model.inference_session(max_length=32, batch_size=2) as session:
        parts = [session.step(ids[:, a:b]) for a, b in [(0, 7), (7, 8), (8, 20)]]
        assert session.position == 20
        assert session.token_ids == tuple(tuple(row) for row in ids.tolist())
        assert session.tokens_sent == 40
        assert [hop.span for hop in session.hops] == [Span(0, 2), Span(2, 4), Span(4, 6)]
    assert close(torch.cat(parts, 1), logits(alone, ids))
    assert session.closed


def test_step_takes_ids_without_a_batch_dimension(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(1, 5)
    with model.inference_session(max_length=8) as session:
        assert close(session.step(ids[0]), logits(alone, ids))


def test_step_takes_hidden_states_and_returns_the_last_blocks_output(pair: Pair) -> None:
    model, _ = pair
    ids = random_ids(2, 6)
    ends = model.ends
    hidden_BLD = torch.stack([ends.embedder(row, 0) for row in ids])
    with model.inference_session(max_length=8, batch_size=2) as session:
        output_BLD = session.step(hidden_BLD)
        assert session.token_ids == ((-1,) * 6,) * 2
    assert output_BLD.shape == hidden_BLD.shape
    assert close(ends.head(output_BLD.flatten(0, 1)).view(2, 6, -1), model(ids).logits)


def test_padding_of_a_step_is_neither_sent_nor_counted(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    with model.inference_session(max_length=16, batch_size=2) as session:
        ours = session.step(ids, attention_mask=mask)
        assert session.lengths == (6, 4)
        more = session.step(random_ids(2, 3, seed=5))
    assert close(ours[1:, :4], logits(alone, ids[1:, :4]))
    assert not ours[1, 4:].any()
    whole = torch.cat([ids[1:, :4], random_ids(2, 3, seed=5)[1:]], 1)
    assert close(more[1:], logits(alone, whole)[:, -3:])


def test_rollback_forgets_tokens(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(1, 12)
    with model.inference_session(max_length=16) as session:
        session.step(ids)
        session.rollback([5])
        other = random_ids(1, 4, seed=9)
        ours = session.step(other)
        assert session.lengths == (9,)
        with pytest.raises(ValueError, match="roll"):
            session.rollback([10])
    assert close(ours, logits(alone, torch.cat([ids[:, :5], other], 1))[:, 5:])


def test_second_turn_prefills_only_what_is_new(pair: Pair) -> None:
    model, alone = pair
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    with model.inference_session(max_length=64) as session:
        first = model.generate(random_ids(1, 12), session=session, **options)
        assert session.tokens_sent == 12 + 9
        prompt = torch.cat([first, random_ids(1, 5, seed=3)], 1)
        second = model.generate(prompt, session=session, **options)
        # The last token of the first turn was never sent.
        assert session.tokens_sent == 12 + 9 + (1 + 5) + 9
        assert session.token_ids == (tuple(second[0, :-1].tolist()),)
    assert_same_tokens(alone, second, prompt, **options)


def test_samples_of_one_prompt_send_it_once(pair: Pair) -> None:
    model, local = pair
    alone: Any = local
    prompts = torch.cat((random_ids(1, 60), random_ids(1, 60, seed=1)))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(5)
    expected = alone.generate(prompts, **options)
    with model.inference_session(80, batch_size=6) as session:
        torch.manual_seed(5)
        assert torch.equal(model.generate(prompts, session=session, **options), expected)
        assert session.tokens_sent == 2 * 60 + 6 * 11
        assert len({row[60:] for row in session.token_ids}) == 6


def test_rows_that_were_fed_unlike_hidden_states_are_not_taken_for_the_same(pair: Pair) -> None:
    model, _ = pair
    ids = random_ids(1, 40).expand(2, -1)
    with model.inference_session(60, batch_size=2) as session:
        session.step(torch.randn(2, 3, model.config.hidden_size))
        first, second = session.step(ids)
    assert not torch.allclose(first, second, atol=1e-3)


def test_a_changed_prompt_is_rolled_back_to_its_common_prefix(pair: Pair) -> None:
    model, alone = pair
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    prompt = random_ids(1, 20)
    changed = prompt.clone()
    changed[0, 14] = (changed[0, 14] + 1) % 320
    with model.inference_session(max_length=64) as session:
        model.generate(prompt, session=session, **options)
        sent = session.tokens_sent
        ours = model.generate(changed, session=session, **options)
        assert session.tokens_sent - sent == (20 - 14) + 7
        again = model.generate(changed, session=session, **options)
        assert session.tokens_sent - sent == (20 - 14) + 7 + 1 + 7
    assert_same_tokens(alone, ours, changed, **options)
    assert torch.equal(ours, again)


def test_candidates_that_the_session_holds_are_still_checked(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(1, 6).repeat(1, 4)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    with model.inference_session(max_length=64) as session:
        for _ in range(2):
            ours = model.generate(ids, session=session, prompt_lookup_num_tokens=4, **options)
            assert_same_tokens(alone, ours, ids, **options)


def test_padded_batch_is_continued_row_by_row(pair: Pair) -> None:
    model, alone = pair
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ids, mask = left_padded([5, 9, 7])
    with model.inference_session(max_length=64, batch_size=3) as session:
        first = model.generate(ids, attention_mask=mask, session=session, **options)
        ids = torch.cat([first, random_ids(3, 4, seed=8)], 1)
        mask = torch.cat([mask, torch.ones(3, 10, dtype=torch.long)], 1)
        sent = session.tokens_sent
        second = model.generate(ids, attention_mask=mask, session=session, **options)
        assert session.tokens_sent - sent == 3 * (1 + 4) + 3 * 5
    assert_same_tokens(alone, second, ids, mask, **options)


def test_session_mixes_steps_and_generate(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(1, 10)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    with model.inference_session(max_length=32) as session:
        session.step(ids[:, :6])
        ours = model.generate(ids, session=session, **options)
        assert session.tokens_sent == 10 + 4
        after = session.step(ours[:, -1:])
    assert_same_tokens(alone, ours, ids, **options)
    assert close(after, logits(alone, ours)[:, -1:])


def test_decoding_loop_with_a_cache_and_crop(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(1, 9)
    with model.inference_session(max_length=32) as session:
        cache = SessionCache(session)
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        assert output.logits.shape[1] == 1
        assert output.past_key_values is cache
        model(ids[:, :4], past_key_values=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 10
        ours = model(ids[:, 5:], past_key_values=cache).logits
    assert close(ours, logits(alone, torch.cat([ids, ids[:, :1], ids[:, 5:]], 1))[:, 10:])


def test_forward_honours_masks_on_both_sides_and_kept_columns(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(3, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8, [1, 1, 1, 1, 1, 0, 0, 0]])
    ours = model(ids, attention_mask=mask).logits
    for row, columns in enumerate([slice(2, 8), slice(0, 8), slice(0, 5)]):
        assert close(ours[row : row + 1, columns], logits(alone, ids[row : row + 1, columns]))
    assert not ours[0, :2].any()
    assert not ours[2, 5:].any()
    kept = model(ids, attention_mask=mask, logits_to_keep=3).logits
    assert close(kept, ours[:, -3:])
    chosen = model(ids, attention_mask=mask, logits_to_keep=torch.tensor([1, 4])).logits
    assert close(chosen, ours[:, [1, 4]])
    dense = model(ids, logits_to_keep=torch.tensor([0, 7])).logits
    assert close(dense, logits(alone, ids)[:, [0, 7]])
    assert model(ids, return_dict=False)[0].shape == (3, 8, 320)


def test_results_can_be_changed_in_place(pair: Pair) -> None:
    model, _ = pair
    model(random_ids(1, 3)).logits.mul_(2)
    with model.inference_session(max_length=4) as session:
        session.step(random_ids(1, 3)).mul_(2)


def test_too_long_a_text_is_refused_before_anything_is_sent(pair: Pair) -> None:
    model, _ = pair
    ids = random_ids(1, 20)
    with pytest.raises(ContextLengthError, match=f"{POSITIONS}"):
        model.generate(ids, max_new_tokens=POSITIONS - 19, do_sample=False)
    with pytest.raises(ContextLengthError, match=f"{POSITIONS}"):
        model.inference_session(max_length=POSITIONS + 1)
    with model.inference_session(max_length=24) as session:
        with pytest.raises(ContextLengthError, match="24"):
            model.generate(ids, max_new_tokens=5, do_sample=False, session=session)
        with pytest.raises(ContextLengthError, match="24"):
            session.step(random_ids(1, 25))
        assert session.tokens_sent == 0
        assert not session.closed
        model.generate(ids, max_new_tokens=4, do_sample=False, session=session)


def test_padding_does_not_count_for_the_context_length(pair: Pair) -> None:
    model, _ = pair
    ids, mask = left_padded([3, 5])
    ids = torch.cat([torch.zeros(2, POSITIONS, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(2, POSITIONS, dtype=torch.long), mask], 1)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    ours = model.generate(ids, attention_mask=mask, **options)
    short = model.generate(ids[:, POSITIONS:], attention_mask=mask[:, POSITIONS:], **options)
    assert torch.equal(ours[:, POSITIONS:], short)


def test_wrong_number_of_rows_is_refused(pair: Pair) -> None:
    model, _ = pair
    with (
        model.inference_session(max_length=16, batch_size=2) as session,
        pytest.raises(ValueError, match="2 rows"),
    ):
        model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False, session=session)


def test_a_session_of_another_model_is_refused(pair: Pair, tiny: Callable[[str], Path]) -> None:
    model, _ = pair
    with (
        local_model(tiny("gpt2")) as other,
        other.inference_session(max_length=16) as session,
        pytest.raises(ValueError, match="another model"),
    ):
        model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False, session=session)


def test_closed_session_says_so(pair: Pair) -> None:
    model, _ = pair
    with model.inference_session(max_length=16) as session:
        pass
    with pytest.raises(ValueError, match="closed"):
        session.step(random_ids(1, 2))


def test_mask_that_changes_its_mind_is_refused(pair: Pair) -> None:
    model, _ = pair
    ids = random_ids(1, 6)
    with model.inference_session(max_length=16) as session:
        cache = SessionCache(session)
        model(ids, past_key_values=cache)
        mask = torch.ones(1, 7, dtype=torch.long)
        mask[0, 2] = 0
        with pytest.raises(UnsupportedFeatureError, match="attention_mask"):
            model(ids[:, :1], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("blocks", [(1, 0), (0, 1), (2, 1), (3, 3)])
def test_client_blocks_run_here_and_are_rolled_back_with_the_rest(
    tiny: Callable[[str], Path], blocks: tuple[int, int]
) -> None:
    ids, mask = left_padded([5, 9])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with local_model(tiny("gpt2"), client_blocks=blocks) as model:
        ours = model.generate(ids, attention_mask=mask, **options)
        assert_same_tokens(reference(tiny("gpt2")), ours, ids, mask, **options)
        del options["pad_token_id"]
        with model.inference_session(max_length=32) as session:
            spans = [hop.span for hop in session.hops]
            assert spans[0].start == 0
            assert spans[-1].end == BLOCKS
            assert all(a.end == b.start for a, b in itertools.pairwise(spans))
            for prompt in (random_ids(1, 12), random_ids(1, 12) * 2 % 320):
                turn = model.generate(prompt, session=session, **options)
                assert_same_tokens(reference(tiny("gpt2")), turn, prompt, **options)
