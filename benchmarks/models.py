"""The models that are measured: random Llamas of fixed sizes, the demo model, or a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

from benchmarks.options import Options
from nesa_node.core.settings.declaration import default_cache_dir
from nesa_node.engine.weights.demo_model import demo_model_path

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32_000,
    },
    "250m": {
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 2816,
        "vocab_size": 32_000,
    },
    "50m": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
        "vocab_size": 32_000,
    },
    # For smoke tests: its figures mean nothing.
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 320,
    },
    # A hidden state as large as that of "250m" with next to no work: what is left is the hop.
    "thin": {
        "hidden_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 64,
        "vocab_size": 320,
    },
}
POSITIONS = 8192
_WEIGHT_SCALES = {"tiny": 8.0}
"""Weights as initialized repeat one token for ever; scaled too far they blow up the last bits."""
_WEIGHT_SCALE = 2.0


@contextmanager
def model_folder(options: Options) -> Iterator[Path]:
    """The folder of `options.model`; a random one is made from `options.seed`, and removed."""
    if options.model == "demo":
        yield demo_model_path(default_cache_dir())
    elif options.model in SHAPES:
        with TemporaryDirectory(prefix="nesa-bench-model-") as folder:
            save_random_llama(
                Path(folder), options.model, dtype=options.torch_dtype, seed=options.seed
            )
            yield Path(folder)
    else:
        yield Path(options.model).expanduser()


def save_random_llama(
    folder: Path, shape: str, *, dtype: torch.dtype, seed: int, positions: int = POSITIONS
) -> None:
    """Save a Llama of one of `SHAPES`, its weights drawn from `seed`, in `dtype` only."""
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and ".layers." in name:
                parameter.data *= _WEIGHT_SCALES.get(shape, _WEIGHT_SCALE)
        model.to(dtype).save_pretrained(folder)


def load_local(folder: Path, options: Options) -> Any:
    """The whole model as transformers loads it: the baseline."""
    auto: Any = AutoModelForCausalLM
    with quiet_transformers():
        model = auto.from_pretrained(
            folder, dtype=options.torch_dtype, local_files_only=True, trust_remote_code=False
        )
    return model.eval().to(options.device)


def random_prompt(model: Any, tokens: int, seed: int) -> torch.Tensor:
    """Token ids [1, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    ids_1L = torch.randint(0, int(model.config.vocab_size), (1, tokens), generator=generator)
    return ids_1L.to(model.device)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without progress bars."""
    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
