"""PEFT folders for tests, written by PEFT itself or byte by byte."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nesa_node.engine.weights.adapter_files import LayerSizes

LAYER = "model.layers.0.self_attn.q_proj"
LAYERS: LayerSizes = {f"model.layers.{index}.self_attn.q_proj": (32, 32) for index in range(4)}


def save_with_peft(base: Path, folder: Path, **options: Any) -> Path:
    """An adapter of the model in `base` with random values, as PEFT's `save_pretrained` writes."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(
            **{
                "r": 4,
                "target_modules": ["q_proj", "v_proj"],
                "task_type": "CAUSAL_LM",
                "init_lora_weights": False,
                **options,
            }
        )
        get_peft_model(auto.from_pretrained(base), config).save_pretrained(str(folder))
    return folder


def config_of(**changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "/home/author/models/base",
        **changes,
    }


def safetensors(tensors: Mapping[str, torch.Tensor], **header: Any) -> bytes:
    """A safetensors file; `header` has entries in place of, or beside, those of `tensors`."""
    entries: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        entries[name] = {
            "dtype": {torch.float32: "F32", torch.float16: "F16", torch.int64: "I64"}[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(entries | header).encode()
    return struct.pack("<Q", len(text)) + text + data


def lora_tensors(
    *paths: str, rank: int = 4, size: int = 32, seed: int = 0
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in paths or (LAYER,):
        name = f"base_model.model.{path}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, size, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(size, rank, generator=generator)
    return tensors


def write_adapter(
    folder: Path, *, weights: bytes | None = None, seed: int = 0, rank: int = 4, **config: Any
) -> Path:
    """A small adapter of a model with `LAYERS`, or files that are none."""
    folder.mkdir(parents=True)
    text = json.dumps(config_of(r=rank, **config))
    (folder / "adapter_config.json").write_text(text)
    content = safetensors(lora_tensors(rank=rank, seed=seed)) if weights is None else weights
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder
