"""GGUF files served through nodes: greedy tokens are those of transformers' load of the file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from nesa_node.core.ids import Span
from nesa_node.engine.weights.demo_model import GGUF_PACKAGE
from tests.e2e.joining import joined
from tests.engine.gguf_files import Kind, add_byte_tokenizer, make_random_model, write_gguf
from tests.same_tokens import assert_same_as, run_reference
from tests.swarms import in_process_swarm

_AUTO: Any = AutoModelForCausalLM
_AUTO_TOKENIZER: Any = AutoTokenizer
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


def load_alone(path: Path) -> Any:
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    return _AUTO.from_pretrained(path.parent, dtype=torch.float32, **options).eval()


def test_two_nodes_serve_a_file(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    path = write_gguf(
        make_random_model(config), tmp_path / "tiny.gguf", kind=Kind.Q8_0,
        tokenizer=add_byte_tokenizer,
    )  # fmt: skip
    alone = load_alone(path)
    ids_BL = torch.tensor([[5, 17, 200, 33, 9, 101]])
    (tmp_path / "swarm").mkdir()
    cache = tmp_path / "cache"
    with (
        in_process_swarm(
            path, [Span(0, 2), Span(2, 4)], tmp_path / "swarm", cache_dir=cache
        ) as addresses,
        joined(path, addresses, "chain", cache_dir=cache) as ours,
    ):
        mask_BL = torch.ones_like(ids_BL)
        new_BL = ours.generate(ids_BL, attention_mask=mask_BL, **OPTIONS)
        assert_same_as(run_reference(alone, ids_BL, mask_BL, **OPTIONS), new_BL)


def demo_file() -> Path:
    """The demo model's own file in its package, which is not imported: that needs llama.cpp."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_nodes_serve_the_demo_models_own_file(tmp_path: Path) -> None:
    path = demo_file()
    alone = load_alone(path)
    tokenizer = _AUTO_TOKENIZER.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    (tmp_path / "swarm").mkdir()
    cache = tmp_path / "cache"
    spans = [Span(0, 10), Span(10, 20), Span(20, 30)]
    with (
        in_process_swarm(path, spans, tmp_path / "swarm", cache_dir=cache) as addresses,
        joined(path, addresses, "chain", cache_dir=cache) as ours,
    ):
        ids_BL, mask_BL = prompt["input_ids"], prompt["attention_mask"]
        options = OPTIONS | {"max_new_tokens": 48, "pad_token_id": 2}
        new_BL = ours.generate(ids_BL, attention_mask=mask_BL, **options)
        expected = run_reference(alone, ids_BL, mask_BL, **options)
        assert_same_as(expected, new_BL)
        text = tokenizer.decode(new_BL[0, ids_BL.shape[1] :], skip_special_tokens=True)
        assert text == "The capital of France is Paris."
