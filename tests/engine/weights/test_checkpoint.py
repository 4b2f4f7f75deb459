from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nesa_node.core.errors import (
    ConfigError,
    CorruptCheckpointError,
    ModelNotFoundError,
    UnsafeCheckpointError,
    UnsupportedModelError,
)
from nesa_node.core.ids import Span
from nesa_node.engine.kernels.machine_code import HUGE_PAGE_BYTES, copy_to_huge_pages
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.families import FAMILIES
from nesa_node.engine.weights.files import read_header, read_tensor
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.engine.weights.tokenizer import load_tokenizer
from tests.engine.chained import open_local
from tests.engine.layouts import rewritten, set_config
from tests.engine.tiny_models import save_tiny_model


@pytest.fixture
def folder(models_dir: Path, tmp_path: Path) -> Path:
    """A model to spoil."""
    return rewritten(save_tiny_model("llama", models_dir), tmp_path / "Spoiled-1B")


def test_a_folder_is_described_without_reading_its_tensors(folder: Path) -> None:
    checkpoint = open_local(folder)
    assert checkpoint.name == "Spoiled-1B"
    assert checkpoint.num_blocks == 6
    assert checkpoint.context_length == 1024
    info = checkpoint.tensors["model.layers.0.self_attn.k_proj.weight"]
    assert (info.shape, info.dtype, info.nbytes) == ((64, 64), torch.float32, 64 * 64 * 4)


def test_tensors_read_back_as_the_library_reads_them(folder: Path) -> None:
    checkpoint = open_local(folder)
    expected = load_file(folder / "model.safetensors")
    assert expected.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())


def test_a_large_tensor_is_read_once_to_where_it_stays(tmp_path: Path) -> None:
    written = torch.arange(HUGE_PAGE_BYTES, dtype=torch.float32)
    save_file({"odd": written[:7].clone(), "large": written}, tmp_path / "m.safetensors")
    found = read_header(tmp_path / "m.safetensors", "m.safetensors")
    read = read_tensor(tmp_path, found["large"])
    assert copy_to_huge_pages(read) is read
    assert torch.equal(read, written)


def test_the_dtype_is_the_configs_then_the_weights(folder: Path) -> None:
    assert open_local(folder).resolve_dtype("auto") == torch.float32
    assert open_local(folder).resolve_dtype("bfloat16") == torch.bfloat16
    set_config(folder, dtype="float16")
    assert open_local(folder).resolve_dtype("auto") == torch.float16
    set_config(folder, dtype=...)
    assert open_local(folder).resolve_dtype("auto") == torch.float32
    with pytest.raises(ConfigError, match="float64"):
        open_local(folder).resolve_dtype("float64")


def test_a_revision_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        open_checkpoint(str(folder), revision="main", cache_dir=folder)


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./no-such-folder", "a/b/c", "what is this", "~no-such-user/x"]
)
def test_a_folder_that_is_not_there_is_not_looked_up_on_the_hub(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is no folder"):
        open_checkpoint(model, cache_dir=tmp_path)


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        open_local(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="no weights"):
        open_local(folder)


def test_pickled_weights_are_refused_with_the_way_to_convert(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpointError, match="save_pretrained"):
        open_local(folder)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "torchao"])
def test_a_checkpoint_in_another_format_is_refused_by_its_method(folder: Path, method: str) -> None:
    set_config(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedModelError, match=method):
        open_local(folder)


@pytest.mark.parametrize("model_type", ["bert", "t5", "mamba", "gemma3", "no_such_model", None])
def test_a_family_that_cannot_be_served_is_told_which_can(
    folder: Path, model_type: str | None
) -> None:
    set_config(folder, model_type=model_type or ...)
    with pytest.raises(UnsupportedModelError, match=r"Llama, Mistral, .*, OPT") as caught:
        open_local(folder)
    assert all(family.title in str(caught.value) for family in FAMILIES.values())


def test_code_in_a_checkpoint_is_never_run(folder: Path) -> None:
    (folder / "modeling.py").write_text("raise SystemExit('this ran')")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    set_config(folder, auto_map=auto_map)
    load_blocks(open_local(folder), Span(0, 1), dtype=torch.float32, device="cpu")
    set_config(folder, model_type=...)
    with pytest.raises(UnsupportedModelError, match="its own Python code"):
        open_local(folder)
    set_config(folder, model_type="unheard_of")
    with pytest.raises(UnsupportedModelError, match="unheard_of"):
        open_local(folder)


@pytest.mark.parametrize(
    ("family", "setting"),
    [("gemma3", {"use_bidirectional_attention": True}), ("gpt2", {"add_cross_attention": True})],
)
def test_a_served_family_with_other_attention_is_refused(
    family: str, setting: dict[str, bool], models_dir: Path, tmp_path: Path
) -> None:
    folder = rewritten(save_tiny_model(family, models_dir), tmp_path / "m")
    set_config(folder, **setting)
    with pytest.raises(UnsupportedModelError, match=next(iter(setting))):
        open_local(folder)


def test_a_long_rope_limits_the_context_to_the_original_length(
    models_dir: Path, tmp_path: Path
) -> None:
    folder = rewritten(save_tiny_model("phi3", models_dir), tmp_path / "m")
    factors = [1.0] * 8
    set_config(
        folder,
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 256,
        },
    )
    assert open_local(folder).context_length == 256


def test_a_config_that_is_no_json_is_corrupt(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match="JSON"):
        open_local(folder)


def test_a_config_with_impossible_values_is_corrupt(folder: Path) -> None:
    set_config(folder, num_hidden_layers="many")
    with pytest.raises(CorruptCheckpointError, match=r"config\.json"):
        open_local(folder)


def _header(entries: object, *, length: int | None = None, data: int = 64) -> bytes:
    raw = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data)


def _entry(
    dtype: object = "F32", shape: object = (4, 4), offsets: object = (0, 64)
) -> dict[str, object]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        _header(_entry(), length=1 << 60),
        _header(_entry(), length=10_000),
        _header(b"{nonsense"),
        _header([1, 2]),
        _header({"w": 3}),
        _header({"w": {"dtype": "F32"}}),
        _header(_entry(offsets=(0, 60))),
        _header(_entry(offsets=(64, 0))),
        _header(_entry(offsets=(-64, 0))),
        _header(_entry(offsets=(32, 96))),
        _header(_entry(shape=(-4, -4))),
        _header(_entry(shape="4")),
        _header(_entry(shape=(4.0, 4.0))),
        _header(_entry(dtype=["F32"])),
        _header(_entry(shape=(1,) * 9 + (16,))),
        _header(b"[" * 200_000),
    ],
)
def test_a_broken_header_is_corrupt(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        open_local(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"num_labels": 10**9},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"n_layer": 1e300},
        {"padding": "x" * (1 << 20)},
    ],
)
def test_a_config_that_asks_for_much_is_refused_before_it_is_made(
    folder: Path, change: dict[str, object]
) -> None:
    """transformers makes lists of so many labels and layers."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CorruptCheckpointError, match=r"config\.json"):
        open_local(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_file_that_is_nested_too_deeply_is_corrupt(folder: Path, file: str) -> None:
    (folder / file).write_text("[" * 200_000)
    with pytest.raises(CorruptCheckpointError, match="not JSON"):
        open_local(folder)


def test_a_tokenizer_too_large_to_parse_is_refused(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json of .* 64"):
        load_tokenizer(folder)


def test_tensors_of_other_dtypes_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(_header(_entry("F6_E3M2", (8, 8))))
    with pytest.raises(UnsupportedModelError, match="F6_E3M2"):
        open_local(folder)


def test_a_file_cut_short_after_opening_is_corrupt(folder: Path) -> None:
    checkpoint = open_local(folder)
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(checkpoint.stored["model.norm.weight"].offset + 4)
    with pytest.raises(CorruptCheckpointError, match="ended early"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "model.bin"])
def test_an_index_that_points_elsewhere_is_corrupt(folder: Path, file: str) -> None:
    index = {"weight_map": {"model.norm.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match="no file beside it"):
        open_local(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match="model-00002-of-00002"):
        open_local(folder)
