"""A tiny model that tells words apart, alone in transformers and in parts here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.engine.weights.tokenizer import load_tokenizer
from nesa_node.evaluation.results import Cell, LocalModels
from tests.cli.tiny import VOCABULARY, WORDS

__all__ = ["load_tokenizer", "local_model", "random_text", "reference"]


@contextmanager
def local_model(
    folder: Path, *, wire: str = "none", weights: str = "none", nodes: int = 3
) -> Iterator[DistributedModelForCausalLM]:
    checkpoint = open_checkpoint(str(folder), cache_dir=folder)
    models = LocalModels(checkpoint, nodes=nodes, dtype=torch.float32, device=torch.device("cpu"))
    with models.open(Cell(weights, wire)) as model:
        yield model


def reference(folder: Path) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(folder, dtype=torch.float32)
    return model


def random_text(words: int, *, seed: int = 0) -> str:
    """Words that `write_tiny_model`'s tokenizer knows, a sentence's end after each ten or so."""
    rng = random.Random(seed)
    names = [*WORDS[2:], *(f"w{index}" for index in range(VOCABULARY - len(WORDS)))]
    told = [rng.choice(names) for _ in range(words)]
    return " ".join(f"{word}." if rng.random() < 0.1 else word for word in told)
