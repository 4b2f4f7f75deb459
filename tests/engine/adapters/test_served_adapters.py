"""Rows with different adapters and none in one iteration, against PEFT.

T tokens of all rows, L of one, D hidden, V vocabulary.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.adapters.peft_folder import PeftFolder
from nesa_node.engine.adapters.segments import NATIVE_MAX_TOKENS
from nesa_node.engine.adapters.served_adapter import (
    ServedAdapter,
    SpanLayout,
    compute_adapter_bytes,
)
from nesa_node.engine.cache.pages import PageTable, pages_for
from nesa_node.engine.kernels.quantized_linear import is_quantizable, make_quantized_linear
from nesa_node.engine.model.blocks import RowChunk
from nesa_node.engine.model.compiled_step import CompiledDecoder
from tests.engine.adapters.peft_models import PeftReference, make_configs, save_adapters
from tests.engine.chained import Chain, distance, new_row
from tests.engine.stored_weights import KINDS, write_quantized
from tests.engine.tiny_models import FAMILIES, prompt_ids, reference, save_tiny_model

# PEFT asks transformers by a name that will be removed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
WITHIN = 5e-5
"""Random adapters make random models worse conditioned: last bits grow more than without."""
FAST = ("llama", "qwen3", "gpt2", "mixtral", "bloom")
WHOLE = [Span(0, 6)]


@dataclass(eq=False)
class Sequence_:
    """A row of the batch, with a table of each span."""

    ids: list[int]
    adapter: int | None
    tables: list[PageTable]
    logits: list[Tensor] = field(default_factory=list)
    fed: int = 0


class Batch:
    """Rows of many sequences in a chain, each with one of the adapters or none."""

    def __init__(self, chain: Chain, folders: Sequence[Path]) -> None:
        self.chain = chain
        self.adapters = [[blocks.load_adapter(each) for blocks in chain.blocks] for each in folders]
        self.pools = [blocks.new_pool(8192) for blocks in chain.blocks]

    def add(self, ids: list[int], adapter: int | None) -> Sequence_:
        pages = pages_for(len(ids) + 32)
        tables = [pool.reserve(pages).new_table() for pool in self.pools]
        return Sequence_(list(ids), adapter, tables)

    def step(self, rows: Sequence[Sequence_], counts: Sequence[int]) -> None:
        """Feed the next `counts` tokens of the rows in one iteration of each span."""
        hidden_TD = torch.cat(
            [
                self.chain.embedder(torch.tensor(row.ids[row.fed : row.fed + count]), row.fed)
                for row, count in zip(rows, counts, strict=True)
            ]
        )
        for number, blocks in enumerate(self.chain.blocks):
            runs = []
            for row, count in zip(rows, counts, strict=True):
                row.tables[number].reserve(row.fed + count)
                adapter = None if row.adapter is None else self.adapters[row.adapter][number]
                runs.append(RowChunk(row.tables[number], count, adapter))
            hidden_TD = blocks.forward(hidden_TD, runs)
        logits_TV = self.chain.head(hidden_TD).float()
        for row, count, logits_LV in zip(
            rows, counts, torch.split(logits_TV, list(counts)), strict=True
        ):
            row.logits.append(logits_LV)
            row.fed += count


def run_mixed(
    batch: Batch, lengths: Sequence[int] = (20, 60, 7, 90, 33, 45), *, decoded: float = 0.7
) -> list[Sequence_]:
    """Prefills and decodes of a row for each adapter and of two without, in random cuts."""
    rng = random.Random(0)
    chosen = [None, *range(len(batch.adapters)), None]
    rows = [
        batch.add(prompt_ids(length, seed=seed), adapter)
        for seed, (length, adapter) in enumerate(zip(lengths, chosen, strict=True))
    ]
    while left := [row for row in rows if row.fed < len(row.ids)]:
        taken = left if rng.random() < 0.5 else rng.sample(left, rng.randint(1, len(left)))
        rest = [len(row.ids) - row.fed for row in taken]
        batch.step(taken, [1 if rng.random() < decoded else rng.randint(1, each) for each in rest])
    return rows


def require_equal(rows: Sequence[Sequence_], theirs: PeftReference) -> None:
    for row in rows:
        expected_LV = theirs.logits(row.ids, row.adapter)
        assert distance(torch.cat(row.logits), expected_LV) <= WITHIN
        if row.adapter is not None:
            assert distance(theirs.logits(row.ids, None), expected_LV) > 1000 * WITHIN


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[] if each in FAST else pytest.mark.slow) for each in FAMILIES],
)
def test_logits_of_mixed_iterations_are_those_of_peft(
    family: str, models_dir: Path, tmp_path: Path
) -> None:
    model = save_tiny_model(family, models_dir)
    folders = save_adapters(model, make_configs(family), tmp_path)
    rows = run_mixed(Batch(Chain(model), folders))
    require_equal(rows, PeftReference(model, folders))


def test_adapters_are_added_to_a_quantized_checkpoint(models_dir: Path, tmp_path: Path) -> None:
    family, pack, config = KINDS["gptq in 4 bits"]
    model = write_quantized(save_tiny_model(family, models_dir), tmp_path / "made", pack, config)
    folders = save_adapters(model.plain, make_configs(family), tmp_path)
    rows = run_mixed(Batch(Chain(model.folder), folders))
    require_equal(rows, PeftReference(model.plain, folders))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mixtral"])
def test_greedy_tokens_are_those_of_peft(family: str, models_dir: Path, tmp_path: Path) -> None:
    """Of five rows that decode together, four of them with adapters."""
    model = save_tiny_model(family, models_dir)
    folders = save_adapters(model, make_configs(family), tmp_path)
    batch = Batch(Chain(model), folders)
    rows = [
        batch.add(prompt_ids(9 + seed, seed=seed), adapter)
        for seed, adapter in enumerate([0, 1, None, 2, 3])
    ]
    prompts = [list(row.ids) for row in rows]
    batch.step(rows, [len(row.ids) for row in rows])
    for _ in range(12):
        for row in rows:
            row.ids.append(int(row.logits[-1][-1].argmax()))
        batch.step(rows, [1] * len(rows))
    theirs = PeftReference(model, folders)
    distinct = set()
    for row, prompt in zip(rows, prompts, strict=True):
        expected = theirs.greedy(prompt, 12, row.adapter)
        assert row.ids[len(prompt) :] == expected
        distinct.update(expected)
    assert len(distinct) >= 16


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_without_machine_code_too(
    family: str, models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, or for layers whose sizes it does not support."""
    monkeypatch.setattr(SpanLayout, "load_functions", lambda _: None)
    model = save_tiny_model(family, models_dir)
    folders = save_adapters(model, make_configs(family), tmp_path)
    rows = run_mixed(Batch(Chain(model), folders))
    require_equal(rows, PeftReference(model, folders))


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_over_quantized_weights(
    family: str, quant_type: QuantType, models_dir: Path, tmp_path: Path
) -> None:
    """Against PEFT on a copy of the model that has the weights that nodes compute with."""
    model = save_tiny_model(family, models_dir)
    folders = save_adapters(model, make_configs(family), tmp_path / "adapters")
    rows = run_mixed(Batch(Chain(model, quant_type=quant_type), folders))
    dequantized = save_dequantized(model, quant_type, tmp_path / "dequantized")
    require_equal(rows, PeftReference(dequantized, folders))


def save_dequantized(model: Path, quant_type: QuantType, target: Path) -> Path:
    copy = reference(model)
    for name, module in copy.named_modules():
        if is_quantizable(module) and name != "lm_head":
            is_turned = not isinstance(module, torch.nn.Linear)  # GPT-2's Conv1D
            quantized = make_quantized_linear(
                module,
                module.weight.data,
                quant_type,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
            weight_OI = quantized.dequantize(torch.float32)
            module.weight.data = weight_OI.t().contiguous() if is_turned else weight_OI
    copy.save_pretrained(target)
    return target


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bfloat16_is_as_near_as_peft(family: str, models_dir: Path, tmp_path: Path) -> None:
    """Both are compared with float32: PEFT's adapters are in float32 over a model in bfloat16."""
    model = save_tiny_model(family, models_dir)
    folders = save_adapters(model, make_configs(family), tmp_path)
    rows = run_mixed(Batch(Chain(model, dtype=torch.bfloat16), folders))
    exact = PeftReference(model, folders)
    theirs = PeftReference(model, folders, torch.bfloat16)
    errors: dict[str, list[float]] = {"ours": [], "theirs": []}
    for row in rows:
        expected_LV = exact.logits(row.ids, row.adapter)
        for name, logits_LV in (
            ("ours", torch.cat(row.logits)),
            ("theirs", theirs.logits(row.ids, row.adapter)),
        ):
            difference_LV = logits_LV - expected_LV
            errors[name].append(float(difference_LV.norm() / expected_LV.norm()))
    assert sum(errors["ours"]) <= 1.25 * sum(errors["theirs"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("quant_type", ["none", "int8"])
def test_rows_without_an_adapter_have_the_same_bits(
    family: str, quant_type: QuantType, dtype: torch.dtype, models_dir: Path, tmp_path: Path
) -> None:
    model = save_tiny_model(family, models_dir)
    folders = save_adapters(model, make_configs(family), tmp_path)
    chain = Chain(model, dtype=dtype, quant_type=quant_type)
    for decoded in (0.7, 0.0):
        outputs = []
        for with_adapters in (False, True):
            batch = Batch(chain, folders)
            if not with_adapters:
                batch.adapters = [[None] * len(chain.blocks) for _ in folders]  # type: ignore[list-item]
            outputs.append(run_mixed(batch, decoded=decoded))
        for plain, beside in zip(*outputs, strict=True):
            is_same = torch.equal(torch.cat(plain.logits), torch.cat(beside.logits))
            assert is_same == (plain.adapter is None)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_row_has_the_same_bits_beside_any_adapters(
    family: str, models_dir: Path, tmp_path: Path
) -> None:
    """Of few tokens, which machine code computes."""
    model = save_tiny_model(family, models_dir)
    folders = save_adapters(model, make_configs(family), tmp_path)
    chain, results = Chain(model), []
    for beside in ([None, None, None], [0, 0, 1], [3, 2, 1], [2, None, 0]):
        batch = Batch(chain, folders)
        row = batch.add(prompt_ids(12, seed=1), 2)
        rows = [*(batch.add(prompt_ids(12, seed=9), each) for each in beside[:2]), row]
        rows.append(batch.add(prompt_ids(12, seed=9), beside[2]))
        for counts in ([3] * 4, [1] * 4, [1] * 4, [2, 1, 4, 1]):
            batch.step(rows, counts)
        results.append(torch.cat(row.logits))
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_parts_of_a_span_use_the_adapter_of_the_whole(
    family: str, models_dir: Path, tmp_path: Path
) -> None:
    model = save_tiny_model(family, models_dir)
    folders = save_adapters(model, make_configs(family), tmp_path)
    [blocks] = Chain(model, spans=WHOLE).blocks
    adapter = blocks.load_adapter(folders[2])
    hidden_LD = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected_LD = run_rows(blocks, [(hidden_LD, adapter)])
    for part in (Span(0, 1), Span(1, 4), Span(4, 6)):
        hidden_LD = run_rows(blocks.select(part), [(hidden_LD, adapter)])
    assert distance(hidden_LD, expected_LD) <= WITHIN


def run_rows(blocks: Any, rows: Sequence[tuple[Tensor, ServedAdapter | None]]) -> Tensor:
    """Outputs [T, D] of new rows in one iteration."""
    pool, runs = blocks.new_pool(4096), []
    for hidden_LD, adapter in rows:
        table = pool.reserve(pages_for(len(hidden_LD))).new_table()
        table.reserve(len(hidden_LD))
        runs.append(RowChunk(table, len(hidden_LD), adapter))
    output_TD: Tensor = blocks.forward(torch.cat([hidden_LD for hidden_LD, _ in rows]), runs)
    return output_TD


def test_few_tokens_run_in_recorded_steps_and_on_any_number_of_threads(
    models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model("llama", models_dir)
    folders = save_adapters(model, make_configs("llama"), tmp_path)
    [blocks] = Chain(model, spans=WHOLE).blocks
    first, second = (blocks.load_adapter(each) for each in (folders[0], folders[3]))
    recorded, run = [], CompiledDecoder.run

    def count_runs(*arguments: Any) -> None:
        recorded.append(arguments)
        run(*arguments)

    monkeypatch.setattr(CompiledDecoder, "run", count_runs)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(count, 64, generator=generator) for count in (3, 2, 1)]
    chosen = list(zip(rows, (first, None, second), strict=True))
    expected_TD = run_rows(blocks, chosen)
    swapped_TD = run_rows(blocks, list(zip(rows, (second, first, None), strict=True)))
    assert len(recorded) == 2
    assert distance(swapped_TD, expected_TD) > 1000 * WITHIN
    assert torch.equal(run_rows(blocks, chosen), expected_TD)
    threads = torch.get_num_threads()
    try:
        for count in (2, 3):
            torch.set_num_threads(count)
            assert torch.equal(run_rows(blocks, chosen), expected_TD)
    finally:
        torch.set_num_threads(threads)


def test_steps_with_and_without_adapters_are_recorded_apart(
    models_dir: Path, tmp_path: Path
) -> None:
    """Of as many tokens, over one pool."""
    model = save_tiny_model("llama", models_dir)
    [folder] = save_adapters(model, make_configs("llama")[:1], tmp_path)
    chain = Chain(model, spans=WHOLE)
    results: list[Tensor] = []
    for first in (None, 0):
        batch = Batch(chain, [folder])
        rows = {adapter: batch.add(prompt_ids(2), adapter) for adapter in (first, 0, None)}
        for row in rows.values():
            batch.step([row], [2])
        results += [rows[None].logits[0], rows[0].logits[0]]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert distance(results[0], results[1]) > 1000 * WITHIN


def test_long_runs_of_one_adapter_may_lie_apart(models_dir: Path, tmp_path: Path) -> None:
    """These are gathered; next to each other, and alone, they are not."""
    model = save_tiny_model("llama", models_dir)
    folders = save_adapters(model, make_configs("llama"), tmp_path)
    [blocks] = Chain(model, spans=WHOLE).blocks
    first, second = (blocks.load_adapter(each) for each in (folders[0], folders[3]))
    generator = torch.Generator().manual_seed(0)
    count = NATIVE_MAX_TOKENS + 1
    rows = [torch.randn(count, 64, generator=generator) for _ in range(4)]
    for chosen in ((first, None, first, second), (first, first, second, second)):
        output_TD = run_rows(blocks, list(zip(rows, chosen, strict=True)))
        for row, adapter, output_LD in zip(
            rows, chosen, torch.split(output_TD, count), strict=True
        ):
            assert distance(output_LD, run_rows(blocks, [(row, adapter)])) <= WITHIN


def test_an_adapter_of_other_blocks_is_refused(models_dir: Path, tmp_path: Path) -> None:
    model = save_tiny_model("llama", models_dir)
    folders = save_adapters(model, make_configs("llama"), tmp_path)
    first, second, _ = Chain(model).blocks
    row = new_row(second)
    row.reserve(1)
    with pytest.raises(ValueError, match="an adapter of blocks 0:2, loaded elsewhere"):
        second.forward(torch.randn(1, 64), [RowChunk(row, 1, first.load_adapter(folders[0]))])
    assert row.length == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_that_is_given_up_is_freed(
    family: str, models_dir: Path, tmp_path: Path
) -> None:
    model = save_tiny_model(family, models_dir)
    folders = save_adapters(model, make_configs(family), tmp_path)
    [blocks] = Chain(model, spans=WHOLE).blocks
    adapter = blocks.load_adapter(folders[0])
    rows = [(torch.randn(count, 64), adapter) for count in (1, NATIVE_MAX_TOKENS + 1)]
    for taken in (rows[:1], rows):
        run_rows(blocks, taken)
    memory = weakref.ref(adapter)
    del adapter, rows, taken
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_known_before_weights_are_read(
    dtype: torch.dtype, models_dir: Path, tmp_path: Path
) -> None:
    model = save_tiny_model("llama", models_dir)
    [folder] = save_adapters(model, [peft.LoraConfig(r=6, target_modules="all-linear")], tmp_path)
    first, *_ = Chain(model, dtype=dtype).blocks
    source = PeftFolder.open(folder)
    nbytes = compute_adapter_bytes(source, first.adapter_layout)
    adapter = first.load_adapter(source)
    # Inputs and outputs of q, k, v, o, gate, up and down; stacked rows are multiples of four.
    inputs = (20 + 12) * 64 + 8 * (128 + 96)
    outputs = 6 * (128 + 64 + 64 + 64 + 96 + 96 + 64)
    assert nbytes == 2 * (inputs + outputs) * dtype.itemsize
    assert nbytes < adapter.nbytes < nbytes + 4096


def test_peft_is_not_imported(models_dir: Path, tmp_path: Path) -> None:
    """A daemon that serves adapters does without its memory and its seconds."""
    model = save_tiny_model("llama", models_dir)
    [folder] = save_adapters(model, make_configs("llama")[:1], tmp_path)
    code = f"""
import sys
from pathlib import Path
from nesa_node.core.ids import Span
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.hub import open_checkpoint
import torch
checkpoint = open_checkpoint({str(model)!r}, cache_dir=Path({str(tmp_path)!r}))
blocks = load_blocks(checkpoint, Span(0, 2), dtype=torch.float32, device="cpu")
print(blocks.load_adapter(Path({str(folder)!r})).nbytes, "peft" in sys.modules)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    nbytes, is_imported = finished.stdout.split()
    assert int(nbytes) > 0
    assert is_imported == b"False"
