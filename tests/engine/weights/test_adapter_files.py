"""Adapters that PEFT wrote, and files that are none, as a peer may send them."""

from __future__ import annotations

import hashlib
import re
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nesa_node.core.errors import AdapterError
from nesa_node.engine.weights.adapter_files import (
    LayerSizes,
    check_adapter_folder,
    check_fits,
    combine_digests,
    find_linear_layers,
    read_adapter_folder,
)
from nesa_node.engine.weights.checkpoint import open_folder
from tests.engine.adapter_folders import (
    LAYER,
    LAYERS,
    config_of,
    lora_tensors,
    safetensors,
    save_with_peft,
    write_adapter,
)

Model = Any


def write_files(folder: Path, config: bytes, weights: bytes) -> str:
    """Write both files; returns their digest."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return combine_digests(config, hashlib.sha256(weights).digest())


def publish(source: Path, target: Path, base_name: str = "tiny") -> str:
    """Write what would be published of `source`; returns its digest."""
    summary = read_adapter_folder(source, base_name)
    weights = (source / "adapter_model.safetensors").read_bytes()
    assert write_files(target, summary.config, weights) == summary.digest
    return summary.digest


def logits(model: Model) -> torch.Tensor:
    ids_1L = torch.arange(5, 15).unsqueeze(0)
    with torch.no_grad():
        result: torch.Tensor = model(ids_1L).logits
    return result


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "mixtral", "phi3", "gemma2", "falcon", "bloom"]
)
def test_layers_of_a_model_fit_what_peft_writes_for_it(
    tiny: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    base = tiny(family)
    checkpoint = open_folder(base)
    layers = find_linear_layers(checkpoint)
    names = {
        path.rpartition(".")[2]
        for path in layers
        if "experts" not in path and not path.endswith((".gate", ".router"))
    }
    folder = save_with_peft(
        base, tmp_path / "adapter", target_modules=sorted(names), fan_in_fan_out=family == "gpt2"
    )
    digest = publish(folder, tmp_path / "published", family)
    summary = check_adapter_folder(tmp_path / "published", digest, layers)
    assert set(summary.target_modules) == names
    assert summary.rank == 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers_to_transform": [1, 2]},
        {"target_modules": r"model\.layers\.[02]\.(self_attn\.q_proj|mlp\.down_proj)"},
        {"target_modules": "all-linear"},
        {"exclude_modules": ["layers.1.self_attn.q_proj"]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3.0}},
        {"use_rslora": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_published_adapter_computes_what_its_source_did(
    tiny: Callable[[str], Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """PEFT applies both: the author's folder and the normalized one."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, auto = tiny("llama"), AutoModelForCausalLM
    folder = save_with_peft(base, tmp_path / "adapter", **options)
    digest = publish(folder, tmp_path / "published")
    check_adapter_folder(tmp_path / "published", digest, find_linear_layers(open_folder(base)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [
            logits(PeftModel.from_pretrained(auto.from_pretrained(base), str(path)))
            for path in (folder, tmp_path / "published")
        ]
    assert torch.equal(*results)
    assert not torch.equal(results[0], logits(auto.from_pretrained(base)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bias": "lora_only"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["lm_head"]}, "no LoRA matrix of a layer in a block"),
        ({"target_modules": ["embed_tokens"]}, "no LoRA matrix of a layer in a block"),
    ],
)
def test_what_nodes_cannot_apply_is_not_published(
    tiny: Callable[[str], Path], tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    folder = save_with_peft(tiny("llama"), tmp_path / "adapter", **options)
    with pytest.raises(AdapterError, match=words):
        read_adapter_folder(folder, "tiny")


def test_an_adapter_of_another_model_does_not_fit(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = save_with_peft(tiny("llama"), tmp_path / "adapter")
    layers = find_linear_layers(open_folder(tiny("llama")))
    check_fits(folder, layers)
    wider: LayerSizes = {path: (size[0] * 2, size[1]) for path, size in layers.items()}
    with pytest.raises(AdapterError, match="it was trained for another model"):
        check_fits(folder, wider)
    with pytest.raises(AdapterError, match="have no linear layer"):
        check_fits(folder, find_linear_layers(open_folder(tiny("gpt2"))))


def test_folders_without_safetensors_say_what_to_do(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="safe_serialization=True"):
        read_adapter_folder(folder, "tiny")
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match="give the folder that PEFT"):
        read_adapter_folder(folder, "tiny")
    (folder / "adapter_model.safetensors").write_bytes(safetensors(lora_tensors()))
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match="cannot be read: No such file"):
        read_adapter_folder(folder, "tiny")
    for config, words in (
        ({"peft_type": "IA3"}, "LORA adapters can be published"),
        ({"peft_type": "PROMPT_TUNING"}, "'PROMPT_TUNING'; LORA adapters can be published"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"r": True}, "r: "),
    ):
        (folder / "adapter_config.json").write_bytes(msgspec.json.encode(config_of(**config)))
        with pytest.raises(AdapterError, match=words):
            read_adapter_folder(folder, "tiny")


def test_nothing_of_the_authors_machine_is_published(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", auto_mapping={"parent_library": "secret"}, revision="x")
    config = msgspec.json.decode(read_adapter_folder(folder, "org/tiny").config)
    assert config["base_model_name_or_path"] == "org/tiny"
    assert not {"auto_mapping", "revision", "peft_version"} & config.keys()
    named_by_path = read_adapter_folder(folder, "/home/author/tiny")
    assert msgspec.json.decode(named_by_path.config)["base_model_name_or_path"] == ""


HUGE_HEADER = struct.pack("<Q", 2**62) + b"{}"
DEEP_HEADER = struct.pack("<Q", 100_000) + b"[" * 100_000


def overlapping() -> bytes:
    """Tensors that share bytes: 100 times the memory of the file."""
    (name, tensor), *_ = lora_tensors().items()
    entries = {
        name.replace("layers.0", f"layers.{index}"): {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [0, 4 * tensor.numel()],
        }
        for index in range(100)
    }
    return safetensors({name: tensor}, **entries)


def not_finite() -> bytes:
    tensors = lora_tensors()
    next(iter(tensors.values()))[0, 0] = torch.nan
    return safetensors(tensors)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (HUGE_HEADER, "its header|the header"),
        (struct.pack("<Q", 2**20 + 1) + bytes(2**20 + 1), "the header"),
        (DEEP_HEADER, "JSON|values"),
        (b"short", "the header"),
        (b"", "not a safetensors"),
        (overlapping(), "overlap"),
        (safetensors(lora_tensors()) + b"tail", "overlap"),
        (safetensors(lora_tensors("model.layers.7.self_attn.q_proj")), "no linear layer"),
        (safetensors(lora_tensors(size=16)), "trained for another model"),
        (safetensors(lora_tensors(rank=8)), "ranks"),
        (safetensors(lora_tensors("lm_head.q_proj")), "no LoRA matrix of a layer"),
        (safetensors(lora_tensors("model.layers.0.self_attn.k_proj")), "do not name"),
        (safetensors(lora_tensors("model.layers.0.mlp.experts")), "experts are not served"),
        (safetensors({"../../x": torch.zeros(2, 2)}), "no LoRA matrix"),
        (
            safetensors({f"base_model.model.{LAYER}.lora_A.weight": torch.zeros(4, 32)}),
            "not a pair",
        ),
        (
            safetensors(
                {name: tensor.long() for name, tensor in lora_tensors().items()}
            ),
            "is no matrix",
        ),
        (not_finite(), "not finite"),
    ],
)  # fmt: skip
def test_hostile_weights_are_refused(tmp_path: Path, weights: bytes, words: str) -> None:
    config = read_adapter_folder(write_adapter(tmp_path / "a"), "tiny").config
    digest = write_files(tmp_path / "sent", config, weights)
    with pytest.raises(AdapterError) as caught:
        check_adapter_folder(tmp_path / "sent", digest, LAYERS)
    assert re.search(words, str(caught.value))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"{}", "base_model|peft_type"),
        (b" " * 70_000, "more than 64 KiB"),
        (b"[" * 30_000, "JSON"),
        (b"[]", "no JSON object"),
        (b"\xff\xfe", "JSON"),
        (msgspec.json.encode(config_of()), "names no model as its base"),
        (msgspec.json.encode(config_of(base_model_name_or_path="x")), "normalized"),
        (
            msgspec.json.encode(config_of(base_model_name_or_path="x", auto_mapping={"a": "b"})),
            "auto_mapping",
        ),
        (msgspec.json.encode(config_of(target_modules=["(a+)+$"])), "target_modules"),
        (msgspec.json.encode(config_of(rank_pattern={"(a+)+$": 4})), "rank_pattern"),
        (msgspec.json.encode(config_of(r=10**9)), "r:"),
        (msgspec.json.encode(config_of(target_modules=["a"] * 5000)), "at most 4096"),
    ],
)
def test_hostile_configs_are_refused(tmp_path: Path, config: bytes, words: str) -> None:
    digest = write_files(tmp_path / "sent", config, safetensors(lora_tensors()))
    with pytest.raises(AdapterError) as caught:
        check_adapter_folder(tmp_path / "sent", digest, LAYERS)
    assert re.search(words, str(caught.value))
    assert len(str(caught.value)) < 500
