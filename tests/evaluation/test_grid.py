"""Cells of the table and how they compare: codecs at every boundary, weights in fewer bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.compression.tensors import decode, encode
from nesa_node.core.errors import ConfigError
from nesa_node.engine.weights.demo_model import demo_model_path
from nesa_node.evaluation.results import (
    WEIGHTS_AS_SERVED,
    Cell,
    CellResult,
    EvaluationSample,
    check_weights,
    check_wire,
    compare_rows,
    make_cells,
    measure_cells,
)
from nesa_node.evaluation.scoring import Perplexity, measure_perplexity
from nesa_node.evaluation.tasks import Accuracy, ChoiceResult
from tests.evaluation.models import load_tokenizer, local_model, random_text, reference

NARROW = "int4:32:16"


def row(nll: torch.Tensor, right: tuple[bool, ...], wire: str = "none") -> CellResult:
    choices = ChoiceResult(Accuracy(right), Accuracy(right))
    return CellResult(Cell("none", wire), Perplexity.from_nll(nll), choices, {}, 1.0)


def test_the_grid_begins_with_what_all_are_compared_with() -> None:
    assert make_cells(["int8", "none"], ["int4:32:16", "none"]) == [
        Cell("none", "none"),
        Cell("none", "int4:32:16"),
        Cell("int8", "int4:32:16"),
        Cell("int8", "none"),
    ]
    assert make_cells(["nf4"], ["lossless"]) == [Cell("none", "none"), Cell("nf4", "lossless")]
    assert make_cells([WEIGHTS_AS_SERVED], ["none", "none"]) == [Cell(WEIGHTS_AS_SERVED, "none")]


def test_unknown_precisions_are_errors() -> None:
    with pytest.raises(ConfigError, match="int9: choose among"):
        check_weights(["none", "int9"])
    with pytest.raises(ConfigError, match=r"--wire gzip: unknown codec; choose among none, .*int8"):
        check_wire(["none", "gzip"], hidden_size=64)


def test_a_change_of_perplexity_is_that_of_the_ratio() -> None:
    nll = torch.rand(640, dtype=torch.float64) + 2
    shifted = nll + 0.01 + torch.rand(640, dtype=torch.float64) * 1e-3
    change = compare_rows(row(shifted, (True, False)), row(nll, (True, False)))
    assert change.perplexity is not None
    assert change.perplexity == pytest.approx(
        math.exp(float(shifted.mean() - nll.mean())) - 1, rel=1e-9
    )
    assert change.perplexity_p is not None
    assert change.perplexity_p < 1e-9
    assert change.plain_p == change.normalised_p == 1.0


def test_what_was_not_measured_has_no_change() -> None:
    change = compare_rows(
        CellResult(Cell("none", "none"), None, None, {}, 0), row(torch.ones(200), (True,))
    )
    assert change.perplexity is None
    assert change.plain_p is None


def test_a_codec_rounds_at_every_boundary_of_the_nodes(words_model: Path) -> None:
    ids = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0))

    def sent(module: Any, inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        meta, data = encode(hidden[0], codec=NARROW)
        rounded = decode(meta, data, max_bytes=1 << 30)[None]
        return (rounded, *output[1:]) if isinstance(output, tuple) else rounded

    alone: Any = reference(words_model)
    with torch.no_grad():
        exact = alone(ids).logits
        # Four blocks on three nodes are 1, 1 and 2.
        for module in (alone.model.embed_tokens, *(alone.model.layers[i] for i in (0, 1, 3))):
            module.register_forward_hook(sent)
        theirs = alone(ids).logits
    with local_model(words_model, wire=NARROW) as model:
        ours = model(ids).logits
    scale = exact.abs().max()
    assert (ours - theirs).abs().max() <= 2e-2 * scale
    assert (ours - exact).abs().max() > 5 * (ours - theirs).abs().max()


@pytest.mark.parametrize(("weights", "least"), [("int8", 0.0), ("nf4", 1e-4)])
def test_weights_in_fewer_bits_are_another_model(
    words_model: Path, weights: str, least: float
) -> None:
    ids = torch.randint(0, 64, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    with local_model(words_model) as model:
        exact = measure_perplexity(model, ids, context=128, stride=64)
    with local_model(words_model, weights=weights) as model:
        rounded = measure_perplexity(model, ids, context=128, stride=64)
    assert least < abs(rounded.mean_nll - exact.mean_nll) < 1


def test_rows_come_one_by_one_and_only_with_what_is_asked_for(words_model: Path) -> None:
    from nesa_node.engine.weights.hub import open_checkpoint
    from nesa_node.evaluation.results import LocalModels

    tokenizer = load_tokenizer(words_model)
    checkpoint = open_checkpoint(str(words_model), cache_dir=words_model)
    models = LocalModels(checkpoint, nodes=9, dtype=torch.float32, device=torch.device("cpu"))
    ids = list(tokenizer(random_text(200))["input_ids"])
    rows = measure_cells(
        models.open,
        tokenizer,
        make_cells(["none"], ["none", NARROW]),
        EvaluationSample(ids, 64, 32, ()),
    )
    first = next(rows)
    assert first.perplexity is not None
    assert first.choices is None
    second = next(rows)
    assert second.perplexity is not None
    assert second.perplexity.mean_nll != first.perplexity.mean_nll
    assert next(rows, None) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_model_reads_english_and_loses_little_by_8_bits(tmp_path: Path) -> None:
    from nesa_node.core.settings.declaration import default_cache_dir
    from nesa_node.engine.weights.hub import open_checkpoint
    from nesa_node.evaluation.results import LocalModels

    folder = demo_model_path(default_cache_dir())
    tokenizer = load_tokenizer(folder)
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    ids = list(tokenizer(text, verbose=False)["input_ids"])[:1025]
    models = LocalModels(
        open_checkpoint(str(folder), cache_dir=tmp_path),
        nodes=3,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    cells = [Cell("none", "none"), Cell("none", "blockwise8:64"), Cell("int8", "none")]
    rows = list(measure_cells(models.open, tokenizer, cells, EvaluationSample(ids, 512, 256, ())))
    assert rows[0].perplexity is not None
    assert 10 < rows[0].perplexity.value < 120
    for other in rows[1:]:
        change = compare_rows(other, rows[0])
        assert change.perplexity is not None
        assert abs(change.perplexity) < 0.05
