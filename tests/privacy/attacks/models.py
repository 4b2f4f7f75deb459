"""A small model with random weights, and its states."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 300


def random_llama() -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def states_after(model: Any, ids_L: torch.Tensor, blocks: int) -> torch.Tensor:
    """[L, D]"""
    with torch.inference_mode():
        states: torch.Tensor = model(ids_L[None], output_hidden_states=True).hidden_states[blocks]
    return states[0].clone()
