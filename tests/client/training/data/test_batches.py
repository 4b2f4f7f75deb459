"""Order and micro-batches of examples, against what is counted one by one."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.loss.loss_utils import ForCausalLMLoss

from nesa_node.client.training.data import batches
from nesa_node.client.training.data.batches import (
    MAX_SEED,
    BatchOrder,
    MicroBatchData,
    PackedLayout,
    PaddedLayout,
    add_virtual_tokens,
    prepend_virtual_tokens,
    require_predicted,
    split_validation,
)
from nesa_node.client.training.data.examples import IGNORED, TrainingExample
from nesa_node.core.errors import ConfigError

MAX_TOKENS = 12
VOCABULARY = 3000
Layout = PackedLayout | PaddedLayout
LAYOUTS = st.builds(PackedLayout, st.integers(MAX_TOKENS, 30)) | st.builds(
    PaddedLayout, st.integers(1, 4)
)
LENGTHS = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=30)
SEEDS = st.integers(0, MAX_SEED)


def make_examples(lengths: list[int]) -> list[TrainingExample]:
    """Example n has the ids 100 n + 1, 100 n + 2, ...; each third token is not learned."""
    examples = []
    for number, length in enumerate(lengths):
        ids = 100 * number + 1 + np.arange(length, dtype=np.int32)
        labels = np.where(np.arange(length) % 3 == 2, np.int32(IGNORED), ids)
        examples.append(TrainingExample(ids, labels))
    return examples


def read_texts(batch: MicroBatchData) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each text of a micro-batch, whose padding is checked."""
    texts = []
    for ids_L, labels_L, lengths in zip(
        batch.ids_RL.tolist(), batch.labels_RL.tolist(), batch.text_lengths, strict=True
    ):
        start = 0
        for length in lengths:
            texts.append((ids_L[start : start + length], labels_L[start : start + length]))
            start += length
        assert set(ids_L[start:]) <= {0}
        assert set(labels_L[start:]) <= {IGNORED}
    return texts


@given(
    lengths=LENGTHS,
    layout=LAYOUTS,
    seed=SEEDS,
    per_step=st.integers(1, 5),
    epoch=st.integers(0, 3) | st.just(10**6),
)
def test_each_epoch_has_each_example_once(
    lengths: list[int], layout: Layout, seed: int, per_step: int, epoch: int
) -> None:
    examples = make_examples(lengths)
    order = BatchOrder(examples, layout, seed=seed, micro_batches_per_step=per_step)
    first = epoch * order.steps_per_epoch
    steps = [order.step(first + index) for index in range(order.steps_per_epoch)]
    assert all(len(step) == per_step for step in steps[:-1])
    assert 1 <= len(steps[-1]) <= per_step
    assert sum(map(len, steps)) == order.micro_batches_per_epoch
    found = [text for step in steps for batch in step for text in read_texts(batch)]
    expected = [
        (example.ids.tolist(), [IGNORED, *example.labels.tolist()[1:]]) for example in examples
    ]
    assert sorted(found) == sorted(expected)


@given(lengths=LENGTHS, layout=LAYOUTS, seed=SEEDS, per_step=st.integers(1, 5))
def test_micro_batch_keeps_the_limits_of_its_layout(
    lengths: list[int], layout: Layout, seed: int, per_step: int
) -> None:
    order = BatchOrder(make_examples(lengths), layout, seed=seed, micro_batches_per_step=per_step)
    for number in range(order.steps_per_epoch):
        step = order.step(number)
        assert order.num_tokens(number) == sum(sum(map(sum, batch.text_lengths)) for batch in step)
        for batch in step:
            rows, length = batch.ids_RL.shape
            assert batch.labels_RL.shape == batch.ids_RL.shape
            assert batch.ids_RL.dtype == batch.labels_RL.dtype == torch.int64
            assert length == max(map(sum, batch.text_lengths))
            if isinstance(layout, PackedLayout):
                assert rows == 1
                assert length <= layout.max_tokens
            else:
                assert 1 <= rows <= layout.rows
                assert all(len(texts) == 1 for texts in batch.text_lengths)
    if isinstance(layout, PaddedLayout):
        assert order.micro_batches_per_epoch == math.ceil(len(lengths) / layout.rows)


@given(lengths=LENGTHS, layout=LAYOUTS, seed=SEEDS, count=st.integers(0, 5))
def test_virtual_tokens_stand_before_each_text_and_are_no_targets(
    lengths: list[int], layout: Layout, seed: int, count: int
) -> None:
    order = BatchOrder(make_examples(lengths), layout, seed=seed, micro_batches_per_step=99)
    for batch in order.step(0):
        wide = add_virtual_tokens(batch, count)
        expected = [
            ([0] * count + ids, [IGNORED] * count + labels) for ids, labels in read_texts(batch)
        ]
        assert read_texts(wide) == expected
        assert wide.num_targets == batch.num_targets == int((wide.labels_RL != IGNORED).sum())


@given(lengths=LENGTHS, seed=SEEDS, count=st.integers(0, 5), room=st.integers(0, 20))
def test_packed_rows_have_room_for_virtual_tokens(
    lengths: list[int], seed: int, count: int, room: int
) -> None:
    layout = PackedLayout(MAX_TOKENS + count + room, num_virtual_tokens=count)
    order = BatchOrder(make_examples(lengths), layout, seed=seed, micro_batches_per_step=99)
    for batch in order.step(0):
        assert add_virtual_tokens(batch, count).ids_RL.numel() <= layout.max_tokens


@given(lengths=LENGTHS, seed=SEEDS, packed=st.booleans())
def test_virtual_tokens_predict_the_first_token(
    lengths: list[int], seed: int, packed: bool
) -> None:
    examples = make_examples(lengths)
    layout: Layout = PaddedLayout(2, num_virtual_tokens=3)
    if packed:
        layout = PackedLayout(MAX_TOKENS + 3, num_virtual_tokens=3)
    order = BatchOrder(examples, layout, seed=seed, micro_batches_per_step=99)
    found = [text for batch in order.step(0) for text in read_texts(batch)]
    wanted = [(each.ids.tolist(), each.labels.tolist()) for each in examples]
    assert sorted(found) == sorted(wanted)


@given(lengths=LENGTHS, seed=SEEDS, packed=st.booleans())
def test_a_first_token_is_no_target_without_virtual_tokens(
    lengths: list[int], seed: int, packed: bool
) -> None:
    examples = make_examples(lengths)
    layouts: list[Layout] = [PaddedLayout(2), PaddedLayout(2, num_virtual_tokens=3)]
    if packed:
        layouts = [PackedLayout(MAX_TOKENS + n, num_virtual_tokens=n) for n in (0, 3)]
    without, with_them = (
        BatchOrder(examples, layout, seed=seed, micro_batches_per_step=99).step(0)
        for layout in layouts
    )
    for batch in without:
        require_predicted(batch)
    for batch in with_them:
        with pytest.raises(ConfigError, match="nothing predicts it"):
            require_predicted(batch)


def test_virtual_tokens_are_seen_in_rows_with_padding() -> None:
    mask_RL = torch.tensor([[1, 1, 0], [1, 1, 1]])
    ids_RL = torch.tensor([[7, 8, 9], [7, 8, 9]])
    wide = prepend_virtual_tokens({"input_ids": ids_RL, "attention_mask": mask_RL, "n": mask_RL}, 2)
    assert wide["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert wide["input_ids"].tolist() == [[0, 0, 7, 8, 9], [0, 0, 7, 8, 9]]
    assert set(wide) == {"input_ids", "attention_mask"}
    narrow = prepend_virtual_tokens({"attention_mask": mask_RL.bool()}, 1)["attention_mask"]
    assert narrow.tolist() == [[True, True, True, False], [True] * 4]


@given(lengths=LENGTHS, layout=LAYOUTS, seed=SEEDS)
def test_loss_counts_the_targets_within_each_text(
    lengths: list[int], layout: Layout, seed: int
) -> None:
    """By the loss that transformers computes, of a model to which all ids are equally likely."""
    examples = make_examples(lengths)
    order = BatchOrder(examples, layout, seed=seed, micro_batches_per_step=len(lengths))
    total = 0
    for batch in order.step(0):
        pairs = 0
        for ids, labels in read_texts(batch):
            for (before, _), (token, label) in pairwise(zip(ids, labels, strict=True)):
                assert token == before + 1
                assert label in (token, IGNORED)
                pairs += label != IGNORED
        loss = ForCausalLMLoss(
            torch.zeros(*batch.ids_RL.shape, VOCABULARY),
            batch.labels_RL,
            VOCABULARY,
            num_items_in_batch=torch.tensor(1),
        )
        assert batch.num_targets == pairs
        assert float(loss) == pytest.approx(pairs * math.log(VOCABULARY), rel=1e-4)
        total += pairs
    assert total == sum(example.num_targets for example in examples)


@given(
    lengths=LENGTHS,
    layout=LAYOUTS,
    seed=SEEDS,
    numbers=st.lists(st.integers(0, 60), min_size=1, max_size=6),
)
def test_step_depends_on_its_number_alone(
    lengths: list[int], layout: Layout, seed: int, numbers: list[int]
) -> None:
    examples = make_examples(lengths)
    order = BatchOrder(examples, layout, seed=seed, micro_batches_per_step=2)
    for number in numbers:
        fresh = BatchOrder(examples, layout, seed=seed, micro_batches_per_step=2)
        for one, two in zip(order.step(number), fresh.step(number), strict=True):
            assert torch.equal(one.ids_RL, two.ids_RL)
            assert torch.equal(one.labels_RL, two.labels_RL)
            assert one.text_lengths == two.text_lengths


@pytest.mark.parametrize("layout", [PackedLayout(MAX_TOKENS), PaddedLayout(2)])
def test_epochs_and_seeds_have_orders_of_their_own(layout: Layout) -> None:
    examples = make_examples([3, 5, 7, 9, 11, 2, 4, 6] * 4)
    orders = [
        BatchOrder(examples, layout, seed=seed, micro_batches_per_step=100) for seed in (0, 1)
    ]
    found = {
        tuple(tuple(ids) for batch in order.step(epoch) for ids, _ in read_texts(batch))
        for order in orders
        for epoch in range(3)
    }
    assert len(found) == 6


def test_order_of_a_seed_stays_the_same_in_all_versions() -> None:
    """Else a training that was begun with an earlier version would go on with other batches."""
    order = BatchOrder(make_examples([2] * 8), PaddedLayout(1), seed=5, micro_batches_per_step=8)
    drawn = [int(batch.ids_RL[0, 0]) // 100 for epoch in (0, 1) for batch in order.step(epoch)]
    assert drawn == [3, 2, 4, 7, 6, 1, 0, 5, 7, 1, 4, 3, 6, 2, 0, 5]


def test_orders_of_examples_are_equally_frequent() -> None:
    order = BatchOrder(make_examples([1] * 3), PaddedLayout(1), seed=3, micro_batches_per_step=3)
    counts = Counter(
        tuple(int(batch.ids_RL[0, 0]) // 100 for batch in order.step(epoch))
        for epoch in range(3000)
    )
    assert len(counts) == 6
    assert all(abs(count - 500) < 110 for count in counts.values())


@given(lengths=LENGTHS, seed=SEEDS, max_tokens=st.integers(MAX_TOKENS, 30))
def test_text_is_packed_into_the_first_row_with_room(
    lengths: list[int], seed: int, max_tokens: int
) -> None:
    """No two rows fit into one, which first-fit promises where all rows are open."""
    order = BatchOrder(
        make_examples(lengths), PackedLayout(max_tokens), seed=seed, micro_batches_per_step=100
    )
    sizes = sorted(batch.ids_RL.shape[1] for batch in order.step(0))
    assert all(one + two > max_tokens for one, two in pairwise(sizes))


def test_few_open_rows_pack_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [7, 7, 7, 5, 5, 5] * 5
    full = BatchOrder(make_examples(lengths), PackedLayout(12), seed=1, micro_batches_per_step=99)
    monkeypatch.setattr(batches, "_OPEN_ROWS", 1)
    few = BatchOrder(make_examples(lengths), PackedLayout(12), seed=1, micro_batches_per_step=99)
    assert few.num_tokens(0) == full.num_tokens(0) == sum(lengths)
    assert few.micro_batches_per_epoch > full.micro_batches_per_epoch


@pytest.mark.parametrize(
    ("layout", "seed", "per_step", "lengths", "reason"),
    [
        (PackedLayout(4), 0, 1, [3, 5], "an example has 5 tokens, and a packed row holds 4"),
        (PackedLayout(4), 0, 1, [], "no examples to train on"),
        (PaddedLayout(1), 0, 1, [2, 0], "an example has no tokens"),
        (PaddedLayout(1), 0, 0, [2], "at least one micro-batch"),
        (PaddedLayout(1), -1, 1, [2], "a seed is a number from 0"),
        (PaddedLayout(1), MAX_SEED + 1, 1, [2], "a seed is a number from 0"),
    ],
)
def test_batches_that_cannot_be_made_are_refused(
    layout: Layout, seed: int, per_step: int, lengths: list[int], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        BatchOrder(make_examples(lengths), layout, seed=seed, micro_batches_per_step=per_step)


def test_layout_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        PackedLayout(0)
    with pytest.raises(ConfigError, match="at least one row"):
        PaddedLayout(0)


def test_negative_step_is_refused() -> None:
    order = BatchOrder(make_examples([2]), PaddedLayout(1), seed=0, micro_batches_per_step=1)
    with pytest.raises(ValueError, match="counted from 0"):
        order.step(-1)


@given(
    count=st.integers(2, 40),
    size=st.integers(1, 39) | st.floats(0, 1, exclude_min=True, exclude_max=True),
    seed=SEEDS,
)
def test_validation_takes_examples_away_from_training(
    count: int, size: int | float, seed: int
) -> None:
    examples = make_examples([2] * count)
    wanted = size if isinstance(size, int) else max(1, round(size * count))
    if wanted >= count:
        with pytest.raises(ConfigError, match="each part needs at least one"):
            split_validation(examples, size, seed=seed)
        return
    training, validation = split_validation(examples, size, seed=seed)
    assert len(validation) == wanted
    numbers = [[int(example.ids[0]) for example in part] for part in (training, validation)]
    assert sorted(numbers[0] + numbers[1]) == [100 * number + 1 for number in range(count)]
    assert all(part == sorted(part) for part in numbers)


def test_validation_depends_on_the_seed() -> None:
    examples = make_examples([2] * 50)
    drawn = {
        tuple(int(example.ids[0]) for example in split_validation(examples, 0.2, seed=seed)[1])
        for seed in (1, 2, 1)
    }
    assert len(drawn) == 2


@pytest.mark.parametrize("size", [0, -1, 0.0, 1.0, -0.5, math.nan, 5])
def test_size_of_validation_out_of_range_is_refused(size: int | float) -> None:
    with pytest.raises(ConfigError, match="for validation"):
        split_validation(make_examples([2] * 5), size, seed=0)
