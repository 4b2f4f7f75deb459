from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig

from benchmarks.models import load_local, model_folder
from benchmarks.options import Dtype, Options
from benchmarks.others import measure_others, rotated, write_gguf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_has_every_weight_in_the_dtype_asked_for(tmp_path: Path, dtype: Dtype) -> None:
    options = Options(model="tiny", dtype=dtype)
    with model_folder(options) as folder:
        local = load_local(folder, options)
    write_gguf(local, tmp_path / "model.gguf", options)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(tensors) == len(local.state_dict())
    down = tensors["blk.5.ffn_down.weight"]
    assert down.tensor_type.name == {"float32": "F32", "bfloat16": "BF16"}[dtype]
    assert down.shape.tolist() == [96, 64]
    assert tensors["output_norm.weight"].tensor_type.name == "F32"


def test_rotation_makes_neighbours_of_what_was_half_a_head_apart() -> None:
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=1, hidden_size=8)
    weight = torch.arange(8.0)[:, None]
    turned = rotated("model.layers.0.self_attn.q_proj.weight", weight, config)
    assert turned[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert rotated("model.layers.0.mlp.up_proj.weight", weight, config) is weight


def test_program_that_is_not_there_is_skipped_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.others.find_spec", lambda _: None)
    assert measure_others(None, Options()) == []
    assert capsys.readouterr().out == "llama.cpp: llama_cpp is not installed, skipped\n"
