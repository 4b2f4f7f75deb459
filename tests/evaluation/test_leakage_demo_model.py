"""The demo model's leakage is that of the file of results, mode by mode, within three points."""

from __future__ import annotations

from pathlib import Path

import pytest

from nesa_node.engine.weights.demo_model import demo_model_path
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.engine.weights.tokenizer import load_tokenizer
from nesa_node.evaluation import tasks as texts
from nesa_node.evaluation.leakage import LeakageMeasurement, LeakageSetup, cut_windows
from nesa_node.evaluation.leakage_claims import CLAIMS, TOKEN_ATTACKS
from nesa_node.evaluation.leakage_page import check_claims, read_leakage
from nesa_node.evaluation.scoring import encode_text
from tests.evaluation.test_leakage_page import RESULTS, ROOT

MOST_POINTS = 3.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.skipif(not texts.HANDBOOK_FOLDER.is_dir(), reason="debian-handbook is not installed")
def test_figures_are_those_of_the_results(tmp_path: Path) -> None:
    expected, options = read_leakage(ROOT / RESULTS)
    assert options["text"] == texts.HANDBOOK
    folder = demo_model_path(tmp_path)
    tokenizer = load_tokenizer(open_checkpoint(str(folder), cache_dir=folder).fetch_side_files())
    ids = encode_text(tokenizer, texts.read_text(texts.HANDBOOK))
    setup = LeakageSetup(
        training_ids=cut_windows(ids[: options["training"]], options["window"]),
        secret_ids=cut_windows(ids[-options["secret"] :], options["window"]),
    )
    found = list(LeakageMeasurement(folder, setup).rows())
    assert check_claims(found) == []
    for row, known in zip(found, expected, strict=True):
        print(row)
        assert (row.mode, row.setting) == (known.mode, known.setting)
        for ours, its in zip(row.recovered, known.recovered, strict=True):
            assert ours.attack == its.attack
            if ours.attack in TOKEN_ATTACKS and not CLAIMS[row.mode].hides_tokens:
                assert abs(ours.percent - its.percent) <= MOST_POINTS
        if known.perplexity is not None:
            assert row.perplexity is not None
            # Noise is of the system's generator: with much of it, runs differ by half.
            most = 2.0 if row.mode == "noise" else 1.01
            assert 1 / most <= row.perplexity / known.perplexity <= most
