from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch

from nesa_node.core.errors import ContextLengthError
from nesa_node.core.ids import Span
from nesa_node.engine.cache.pages import PAGE_TOKENS, PagePool
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.compiled_step import COMPILED_MAX_TOKENS
from nesa_node.engine.model.devices import (
    MAX_DECODE_STEPS,
    MAX_PREFILL_REPEATS,
    MIN_DECODE_STEPS,
    measure_throughput,
)
from nesa_node.engine.model.embedder_and_head import load_embedder_and_head
from nesa_node.engine.model.loading import load_blocks
from tests.engine.chained import Chain, Run, distance, forward, new_row, open_local
from tests.engine.tiny_models import FAMILIES, prompt_ids, reference, save_tiny_model

# What a rounding in another order makes of a few blocks.
SIXTEEN_BITS = {torch.float16: 5e-3, torch.bfloat16: 4e-2}


def load(
    family: str, models_dir: Path, span: Span, dtype: torch.dtype = torch.float32
) -> ModelBlocks:
    checkpoint = open_local(save_tiny_model(family, models_dir))
    return load_blocks(checkpoint, span, dtype=dtype, device="cpu")


@pytest.fixture
def blocks(models_dir: Path) -> ModelBlocks:
    return load("llama", models_dir, Span(1, 4))


def hidden(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens))


def test_a_span_holds_its_own_weights_only(blocks: ModelBlocks, models_dir: Path) -> None:
    tensors = open_local(save_tiny_model("llama", models_dir)).tensors
    mine = sum(
        info.nbytes
        for name, info in tensors.items()
        if name.startswith(("model.layers.1.", "model.layers.2.", "model.layers.3."))
    )
    assert blocks.weight_bytes == mine


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_takes_what_is_announced(family: str, models_dir: Path) -> None:
    blocks = load(family, models_dir, Span(2, 5))
    pool = blocks.new_pool(PAGE_TOKENS)
    taken = sum(tensor.nbytes for tensor in pool.tensors)
    assert taken == PAGE_TOKENS * blocks.cache_bytes_per_token
    config = reference(save_tiny_model(family, models_dir)).config
    heads = getattr(config, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None)
    heads = 1 if family == "falcon" else heads or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or 64 // config.num_attention_heads
    assert blocks.cache_bytes_per_token == 2 * head_dim * heads * 3 * 4


def test_a_cache_of_another_span_is_refused(blocks: ModelBlocks) -> None:
    with pytest.raises(ValueError, match="2:4"):
        forward(blocks, hidden(1), new_row(blocks.select(Span(2, 4))))


@pytest.mark.parametrize("span", [Span(0, 2), Span(3, 5), Span(2, 2)])
def test_only_part_of_the_span_can_be_taken(blocks: ModelBlocks, span: Span) -> None:
    with pytest.raises(ValueError, match="not within"):
        blocks.select(span)


def test_a_part_shares_the_weights(blocks: ModelBlocks) -> None:
    part = blocks.select(Span(2, 4))
    assert part is blocks.select(Span(2, 4))
    whole = {id(module) for module in blocks._decoder.modules()}
    assert {id(module) for module in part._decoder.layers.modules()} - {
        id(part._decoder.layers)
    } < whole
    assert part.weight_bytes * len(blocks.span) == blocks.weight_bytes * len(part.span)


@pytest.mark.parametrize("shape", [(3,), (3, 63), (0, 64), (1, 3, 64)])
def test_hidden_states_of_another_shape_are_refused(
    blocks: ModelBlocks, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="expected"):
        forward(blocks, torch.zeros(shape), new_row(blocks))


def test_the_context_ends_where_the_model_says(blocks: ModelBlocks) -> None:
    cache = new_row(blocks, 2048)
    forward(blocks, hidden(1000), cache)
    with pytest.raises(ContextLengthError, match="1025 tokens; the model holds 1024"):
        forward(blocks, hidden(25), cache)
    assert cache.length == 1000
    forward(blocks, hidden(24), cache)


def test_a_step_that_fails_leaves_the_cache_as_it_was(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, undisturbed = new_row(blocks), new_row(blocks)
    for each in (cache, undisturbed):
        forward(blocks, hidden(20), each)
    last = blocks._decoder.layers[-1].down_proj
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", lambda hidden: 1 / 0)
        # Fewer tokens would not come that way.
        with pytest.raises(ZeroDivisionError):
            forward(blocks, hidden(COMPILED_MAX_TOKENS + 1) + 1, cache)
    assert cache.length == 20
    assert torch.equal(forward(blocks, hidden(5), cache), forward(blocks, hidden(5), undisturbed))


@pytest.mark.parametrize("length", [-1, 21])
def test_a_rollback_beyond_the_cache_is_refused(blocks: ModelBlocks, length: int) -> None:
    cache = new_row(blocks)
    forward(blocks, hidden(20), cache)
    with pytest.raises(ValueError, match="roll back"):
        cache.truncate(length)


@pytest.mark.parametrize("span", [Span(3, 3), Span(4, 7)])
def test_a_span_the_model_does_not_have_is_refused(span: Span, models_dir: Path) -> None:
    with pytest.raises(ValueError, match="0:6"):
        load("llama", models_dir, span)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_give_nearly_what_transformers_gives_with_them(
    family: str, dtype: torch.dtype, models_dir: Path
) -> None:
    folder = save_tiny_model(family, models_dir)
    prompt = prompt_ids(60)
    with torch.inference_mode():
        expected = reference(folder, dtype)(torch.tensor([prompt])).logits[0]
    logits = Run(Chain(folder, dtype=dtype)).step(prompt)
    assert logits.dtype == dtype
    assert distance(logits.float(), expected.float()) <= SIXTEEN_BITS[dtype]


def test_hidden_states_of_another_dtype_are_converted(models_dir: Path) -> None:
    blocks = load("llama", models_dir, Span(0, 2), torch.bfloat16)
    output = forward(blocks, hidden(3), new_row(blocks))
    assert output.dtype == torch.bfloat16


def test_progress_ends_at_the_bytes_loaded(models_dir: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    blocks = load_blocks(
        checkpoint,
        Span(0, 2),
        dtype=torch.bfloat16,
        device="cpu",
        progress=lambda task, done, total: seen.append((task, done, total)),
    )
    assert seen[-1] == ("loading blocks 0:2", blocks.weight_bytes, blocks.weight_bytes)


def test_ends_load_alone(models_dir: Path) -> None:
    checkpoint = open_local(save_tiny_model("opt_projected", models_dir))
    embedder, head = load_embedder_and_head(checkpoint, dtype=torch.float32, device="cpu")
    assert head(embedder(torch.tensor([1, 2, 3]), 0)).shape == (3, head.vocab_size)


@pytest.mark.parametrize("ids", [[-1], [320]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int], models_dir: Path) -> None:
    checkpoint = open_local(save_tiny_model("gpt2", models_dir))
    embedder, _ = load_embedder_and_head(checkpoint, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="0 to 319"):
        embedder(torch.tensor(ids), 0)
    with pytest.raises(ContextLengthError):
        embedder(torch.tensor([1, 2]), 1023)


def test_throughput_is_tokens_over_time(blocks: ModelBlocks) -> None:
    """Each reading of the clock is a second later: whatever is timed takes one."""
    seconds = itertools.count()
    throughput = measure_throughput(blocks, clock=lambda: float(next(seconds)))
    assert throughput.prefill_tokens_per_s == 128
    assert throughput.decode_tokens_per_s == 1
    # One short prefill, one step too many for the time that there is, as few as tell something.
    assert next(seconds) <= 2 * (2 + MIN_DECODE_STEPS + 1) + 5


def test_short_steps_are_timed_as_often_as_tells_their_speed(blocks: ModelBlocks) -> None:
    """Each reading of the clock is a millisecond later."""
    seconds = itertools.count()
    measure_throughput(blocks, clock=lambda: next(seconds) / 1000)
    assert next(seconds) >= 2 * (1 + MAX_DECODE_STEPS + MAX_PREFILL_REPEATS)


@pytest.mark.parametrize("undisturbed", [True, False])
def test_the_fastest_steps_tell_what_a_busy_machine_could_do(
    blocks: ModelBlocks, undisturbed: bool
) -> None:
    """Three of four steps take 5 ms instead of 1 ms, and so do three of four prefills."""
    now, readings = 0.0, itertools.count()

    def clock() -> float:
        nonlocal now
        now += 0.001 if next(readings) // 2 % 4 == 1 else 0.005
        return now

    throughput = measure_throughput(blocks, clock=clock, undisturbed=undisturbed)
    fast = throughput.decode_tokens_per_s > 0.9 / 0.001
    assert fast == undisturbed
    assert (throughput.prefill_tokens_per_s > 0.9 * 128 / 0.001) == undisturbed


def test_throughput_is_measured_by_the_clock_of_the_machine(blocks: ModelBlocks) -> None:
    throughput = measure_throughput(blocks)
    assert min(throughput.prefill_tokens_per_s, throughput.decode_tokens_per_s) > 0


def test_a_measurement_frees_its_caches(blocks: ModelBlocks) -> None:
    """At once, not when cycles of objects are collected: a GPU's memory does not wait for that."""
    measure_throughput(blocks)
    gc.collect()
    before = num_pools()
    gc.disable()
    try:
        measure_throughput(blocks)
        assert num_pools() == before
    finally:
        gc.enable()


def num_pools() -> int:
    return sum(type(each) is PagePool for each in gc.get_objects())
