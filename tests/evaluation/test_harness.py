"""The adapter against the harness's own model class, on the same small model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nesa_node.core.errors import ConfigError, UnsupportedFeatureError
from nesa_node.evaluation.tasks import generate_items, measure_choices
from tests.evaluation.models import load_tokenizer, local_model, random_text, reference

TASK = """
task: tiny_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: endings
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture(scope="module")
def harness() -> Any:
    """lm-evaluation-harness, which warns a lot while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
        from lm_eval.models.huggingface import HFLM

        import nesa_node.evaluation.harness as ours
        from nesa_node.evaluation.tasks import HarnessTasks

        return SimpleNamespace(HFLM=HFLM, HarnessModel=ours.HarnessModel, Tasks=HarnessTasks)


@pytest.fixture
def pair(harness: Any, words_model: Path) -> Iterator[tuple[Any, Any]]:
    tokenizer = load_tokenizer(words_model)
    with local_model(words_model) as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = harness.HFLM(
            reference(words_model),
            tokenizer=tokenizer,
            max_length=128,
            batch_size=3,
            device="cpu",
            dtype=torch.float32,
        )
        yield harness.HarnessModel(model, tokenizer, max_length=128), theirs


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [
        SimpleNamespace(args=args, arguments=args, request_type="", doc={}) for args in arguments
    ]


def test_log_likelihoods_equal_those_of_the_harness(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    shared = random_text(40, seed=1)
    asked = requests(
        *((shared, f" {random_text(6, seed=seed)}") for seed in range(4)),
        ("hello ", "again the"),
        ("", random_text(9)),
        (random_text(200, seed=7), f" {random_text(5, seed=8)}"),
    )
    for mine, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-4)
        assert mine[1] == other[1]


def test_a_greedy_continuation_is_told_to_be_one(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    answer = ours.generate_until(requests((random_text(20), {"max_gen_toks": 5})))[0]
    asked = requests((random_text(20), f" {answer}"), (random_text(20), " hello hello hello"))
    assert [greedy for _, greedy in ours.loglikelihood(asked)] == [True, False]
    assert [greedy for _, greedy in theirs.loglikelihood(asked)] == [True, False]


@pytest.mark.parametrize("words", [5, 127, 128, 129, 300])
def test_rolling_log_likelihoods_equal_those_of_the_harness(
    pair: tuple[Any, Any], words: int
) -> None:
    ours, theirs = pair
    asked = requests((random_text(words),), (random_text(11, seed=3),))
    mine, other = ours.loglikelihood_rolling(asked), theirs.loglikelihood_rolling(asked)
    assert mine == pytest.approx(other, rel=1e-6, abs=1e-4)


def test_generation_equals_that_of_the_harness(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    prompt = random_text(30)
    whole = ours.generate_until(requests((prompt, {"until": [], "max_gen_toks": 12})))[0]
    stop = whole.split()[5]
    asked = requests((prompt, {"until": [stop], "max_gen_toks": 12}))
    (mine,), (other,) = ours.generate_until(asked), theirs.generate_until(asked)
    assert mine == other
    assert whole.startswith(mine)
    assert stop not in mine


def test_an_answer_longer_than_the_model_is_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="leave no room"):
        pair[0].generate_until(requests(("hello", {"until": [], "max_gen_toks": 128})))


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    items = generate_items(random_text(4000), count=20, seed=0)
    file = tmp_path / "items.jsonl"
    file.write_text("".join(f"{item.model_dump_json()}\n" for item in items), encoding="utf-8")
    (tmp_path / "tiny_words.yaml").write_text(TASK.format(file=file), encoding="utf-8")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    return tmp_path


@pytest.mark.filterwarnings("ignore")
def test_a_task_of_ones_own_gives_what_the_items_themselves_give(
    harness: Any, words_model: Path, task_folder: Path
) -> None:
    items = generate_items(random_text(4000), count=20, seed=0)
    tokenizer = load_tokenizer(words_model)
    tasks = harness.Tasks(["tiny_words"], folder=task_folder)
    with local_model(words_model) as model:
        told = tasks.measure(model, tokenizer)
        own = measure_choices(model, tokenizer, items)
    assert told["tiny_words"].metric == "acc_norm"
    assert told["tiny_words"].values == tuple(map(float, own.normalised.right))
    assert told["tiny_words"].standard_error == pytest.approx(own.normalised.standard_error)


@pytest.mark.filterwarnings("ignore")
def test_eval_shows_a_task_beside_the_rest(
    harness: Any, words_model: Path, task_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nesa_node.cli.app import run_command

    table = task_folder / "table.json"
    argv = ["eval", str(words_model), "--weights", "none", "--wire", "none", "--json", str(table)]
    argv += ["--tokens", "0", "--items", "0", "--tasks", "tiny_words", "--task-limit", "10"]
    assert run_command([*argv, "--task-folder", str(task_folder)]) == 0
    assert "tiny_words" in capsys.readouterr().out
    (row,) = json.loads(table.read_text())
    assert len(row["tasks"]["tiny_words"]["values"]) == 10
    assert "perplexity" not in row


@pytest.mark.filterwarnings("ignore")
def test_data_that_cannot_be_had_is_an_error(
    harness: Any, words_model: Path, task_folder: Path
) -> None:
    (task_folder / "items.jsonl").unlink()
    tasks = harness.Tasks(["tiny_words"], folder=task_folder)
    with (
        local_model(words_model) as model,
        pytest.raises(ConfigError, match="a dataset cannot be loaded"),
    ):
        tasks.measure(model, load_tokenizer(words_model))


@pytest.mark.slow  # The harness reads 13,000 files first.
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_is_an_error(harness: Any) -> None:
    with pytest.raises(ConfigError, match="no such task"):
        harness.Tasks(["hellaswagg"])


def test_without_the_harness_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    from nesa_node.evaluation.tasks import HarnessTasks, require_harness

    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "nesa_node.evaluation.harness", raising=False)
    require_harness.cache_clear()
    with pytest.raises(UnsupportedFeatureError, match="nesa-node\\[eval\\]"):
        HarnessTasks(["hellaswag"])
    require_harness.cache_clear()
