"""What a program that takes any transformers model asks of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

from nesa_node.core.errors import UnsupportedFeatureError
from nesa_node.engine.weights.tokenizer import load_tokenizer
from tests.cli.tiny import write_tiny_model
from tests.client.local_models import local_model
from tests.engine.tiny_models import reference


def test_a_pipeline_prints_nothing_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither that it knows other models, nor that it moved this one."""
    folder = write_tiny_model(tmp_path / "words")
    make: Any = pipeline
    with local_model(folder) as model:
        capfd.readouterr()
        generate = make("text-generation", model=model, tokenizer=load_tokenizer(folder))
        asked = ["hello again", "the capital"]
        answers = generate(asked, batch_size=2, max_new_tokens=3, do_sample=False)
        assert capfd.readouterr().err == ""
    for text, (answer,) in zip(asked, answers, strict=True):
        assert answer["generated_text"].startswith(text)


def test_its_repr_says_what_it_is_and_asks_nobody(tiny: Callable[[str], Path]) -> None:
    folder = tiny("llama")
    with local_model(folder, client_blocks=(1, 1)) as model:
        before = repr(model)
        assert f"{folder.name}, 6 blocks: 0:1 here, 1:5 in the swarm, 5:6 here" in before
        assert "float32 on cpu" in before
        assert "the swarm is joined with the first session" in before
        with model.inference_session(16):
            during = repr(model)
            assert "open session of 16 tokens: …client 0:1 → …client 1:2" in during
            assert "first session" not in during
        assert "open session" not in repr(model)
    assert "closed" in repr(model)
    assert "first session" not in repr(model)


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "gpt2"])
def test_its_embeddings_are_the_models_own(tiny: Callable[[str], Path], family: str) -> None:
    folder = tiny(family)
    alone = reference(folder)
    ids_BL = torch.tensor([[5, 6, 7]])
    with local_model(folder) as model, torch.no_grad():
        embedded = model.get_input_embeddings()(ids_BL)
        assert torch.equal(embedded, alone.get_input_embeddings()(ids_BL))
        head, expected = model.get_output_embeddings(), alone.get_output_embeddings()
        assert isinstance(head, torch.nn.Linear)
        assert torch.equal(head.weight, expected.weight)


def test_its_parameters_are_those_of_its_ends(tiny: Callable[[str], Path]) -> None:
    """`next(model.parameters()).device` is how much code asks where a model is."""
    folder = tiny("llama")
    alone = reference(folder)
    with local_model(folder) as model:
        assert {name for name, _ in model.named_parameters()} == {
            "embed_tokens.weight",
            "lm_head.weight",
        }
        embedding, head = model.parameters()
        assert torch.equal(embedding, alone.get_input_embeddings().weight)
        assert torch.equal(head, alone.get_output_embeddings().weight)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert model.num_parameters() == embedding.numel() + head.numel()


def test_its_ends_cannot_be_changed(tiny: Callable[[str], Path]) -> None:
    with local_model(tiny("llama")) as model:
        with pytest.raises(UnsupportedFeatureError, match="stay as"):
            model.resize_token_embeddings(400)
        with pytest.raises(UnsupportedFeatureError, match="stay as"):
            model.set_input_embeddings(torch.nn.Embedding(4, 4))
        with pytest.raises(UnsupportedFeatureError, match="stay as"):
            model.set_output_embeddings(torch.nn.Linear(4, 4))
