"""Adapters made by PEFT for small random models, and PEFT's own logits with them.

L tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from tests.engine.tiny_models import greedy, reference

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def make_configs(family: str) -> list[peft.LoraConfig]:
    """Four adapters that differ in rank, scale and what they adapt."""
    # Of a mixture PEFT would adapt the stacked experts too, which nodes refuse.
    modules: Any = ATTENTION if family == "mixtral" else "all-linear"
    one: Any = {"gpt2": ["c_attn"], "mixtral": ["v_proj"]}.get(family, "all-linear")
    return [
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules),
        peft.LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=one),
        peft.LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=modules,
            exclude_modules=r".*\.(2|4|5)\..*",
            rank_pattern={
                "1.*proj": 2,
                "c_attn": 5,
                "query_key_value": 5,
                "q_proj": 6,
                r"^.*\.0\..*k_proj": 7,
            },
            alpha_pattern={"v.proj": 2, "attn.c_proj": 3, r"[0-3]\..*dense|fc1": 4},
        ),
        peft.LoraConfig(r=16, lora_alpha=4, target_modules=modules),
    ]


def save_adapters(model: Path, configs: Sequence[peft.LoraConfig], folder: Path) -> list[Path]:
    """Save an adapter for each config, with random weights that change the model's logits."""
    base, generator = reference(model), torch.Generator().manual_seed(0)
    folders = [folder / str(number) for number in range(len(configs))]
    for config, target in zip(configs, folders, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what PEFT changes in configs to fit the model
            adapted: Any = peft.get_peft_model(copy.deepcopy(base), config)
        for name, value in adapted.named_parameters():
            if "lora_" in name:
                noise = torch.randn(value.shape, generator=generator)
                value.data = noise / value.shape[1] ** 0.5 * (0.3 if "lora_B" in name else 1.0)
        adapted.save_pretrained(target)
    return folders


class PeftReference:
    """A model of transformers with adapters that PEFT has read, one of them active at a time."""

    def __init__(
        self, model: Path, folders: Sequence[Path], dtype: torch.dtype = torch.float32
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base, first = reference(model, dtype), folders[0]
            self._model: Any = peft.PeftModel.from_pretrained(base, first, adapter_name="0")
            for number, folder in enumerate(folders[1:], 1):
                self._model.load_adapter(folder, adapter_name=str(number))
        self._model.eval()

    @torch.inference_mode()
    def logits(self, ids: list[int], adapter: int | None) -> Tensor:
        """Logits [L, V] in float32 of a sequence, with the adapter of that number or none."""
        with self._use(adapter):
            logits_LV: Tensor = self._model(input_ids=torch.tensor([ids])).logits[0]
        return logits_LV.float()

    def greedy(self, prompt: list[int], count: int, adapter: int | None) -> list[int]:
        with self._use(adapter):
            return greedy(self._model, prompt, count)

    def _use(self, adapter: int | None) -> Any:
        if adapter is None:
            return self._model.disable_adapter()
        self._model.set_adapter(str(adapter))
        return nullcontext()
