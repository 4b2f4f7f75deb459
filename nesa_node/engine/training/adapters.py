"""Adapters that PEFT does not have, what is supported of those that it has, and optimizers.

R sequences, L tokens of each, D hidden, P virtual tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from nesa_node.core.errors import ConfigError

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True)
class BottleneckConfig:
    """An adapter after each block (Nesa paper, eq. 5)."""

    size: int = 64
    """Numbers between the two matrices."""
    activation: str = "relu"
    """A key of `ACTIVATIONS`."""
    norm: Literal["before", "printed"] = "before"
    """"before": h + W2 f(W1 LayerNorm(h)), which changes nothing before it is trained. "printed":
    LayerNorm(h + W2 f(W1 h)), as eq. 5 stands in the paper: an untrained one already changes what
    the next block gets."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if self.size < 1:
            raise ConfigError(f"the size of a bottleneck adapter must be positive, got {self.size}")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation {self.activation!r}: use {', '.join(ACTIVATIONS)}")
        if self.norm not in ("before", "printed"):
            raise ConfigError(f"norm {self.norm!r}: use before or printed")

    def make_module(self, hidden_size: int) -> BlockAdapter:
        return BottleneckAdapter(self, hidden_size)


@dataclass(frozen=True, slots=True)
class DeepPromptConfig:
    """Trained vectors that are added to the first tokens of each text, in each block's input.

    Texts begin with as many virtual tokens.
    """

    num_virtual_tokens: int = 16

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if self.num_virtual_tokens < 1:
            raise ConfigError(f"num_virtual_tokens must be positive, got {self.num_virtual_tokens}")

    def make_module(self, hidden_size: int) -> BlockAdapter:
        return DeepPrompt(self.num_virtual_tokens, hidden_size)


@dataclass(frozen=True, slots=True)
class FullConfig:
    """No adapters: the blocks' own weights, of which a node makes a copy to train."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the copy, and of what is computed with it."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype {self.dtype!r}: train weights in float32 or bfloat16")

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


class BlockAdapter(nn.Module):
    """Part of the model at the edge of one block."""

    title: str
    """In names of parameters."""

    def change_input(self, hidden_RLD: Tensor, positions_RL: Tensor) -> Tensor:
        """`positions_RL` may have one row for all."""
        return hidden_RLD

    def change_output(self, hidden_RLD: Tensor) -> Tensor:
        return hidden_RLD


class BottleneckAdapter(BlockAdapter):
    title = "bottleneck"

    def __init__(self, config: BottleneckConfig, hidden_size: int) -> None:
        super().__init__()
        self._config = config
        self.norm = nn.LayerNorm(hidden_size)
        self.down = nn.Linear(hidden_size, config.size)
        self.up = nn.Linear(config.size, hidden_size)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def change_output(self, hidden_RLD: Tensor) -> Tensor:
        activate = ACTIVATIONS[self._config.activation]
        wide_RLD = hidden_RLD.to(self.up.weight.dtype)
        if self._config.norm == "printed":
            output_RLD: Tensor = self.norm(wide_RLD + self.up(activate(self.down(wide_RLD))))
        else:
            output_RLD = wide_RLD + self.up(activate(self.down(self.norm(wide_RLD))))
        return output_RLD.to(hidden_RLD.dtype)


class DeepPrompt(BlockAdapter):
    title = "deep_prompt"

    def __init__(self, num_virtual_tokens: int, hidden_size: int) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(num_virtual_tokens, hidden_size))

    def change_input(self, hidden_RLD: Tensor, positions_RL: Tensor) -> Tensor:
        count = len(self.prompt)
        # Other tokens get the last row: zeros.
        vectors = functional.pad(self.prompt, (0, 0, 0, 1))
        added_RLD = functional.embedding(positions_RL.clamp(max=count), vectors)
        return hidden_RLD + added_RLD.to(hidden_RLD.dtype)


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """torch's optimizers with their defaults; the learning rate comes with each step."""

    name: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if self.name not in ("adamw", "sgd"):
            raise ConfigError(f"optimizer {self.name!r}: use adamw or sgd")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be from 0 to below 1, got {self.betas}")
        for name in ("eps", "weight_decay", "momentum"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be a number from 0 on, got {value}")

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What the optimizer keeps of each parameter, by torch's names."""
        if self.name == "adamw":
            return ("step", "exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.momentum else ()

    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
        """Make the optimizer; None without parameters."""
        if not parameters:
            return None
        if self.name == "sgd":
            return torch.optim.SGD(
                parameters, lr=0.0, momentum=self.momentum, weight_decay=self.weight_decay
            )
        return torch.optim.AdamW(
            parameters,
            lr=0.0,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


def get_kind(config: Any) -> str:
    """`peft_type` of a config of PEFT, such as "LORA"; empty for one of this project's."""
    kind = getattr(config, "peft_type", "")
    return str(getattr(kind, "value", kind))


def require_supported(config: Any) -> None:
    """Check a config of PEFT.

    Raises `ConfigError` for what would train, or read, other weights than the adapters'.
    """
    kind = get_kind(config)
    if kind not in ("LORA", "IA3"):
        raise ConfigError(
            f"{kind} adapters cannot be trained on nodes; LORA and IA3 can, and a client trains "
            "PROMPT_TUNING itself"
        )
    if getattr(config, "modules_to_save", None):
        raise ConfigError("modules_to_save: only adapters are trained in a swarm")
    if getattr(config, "bias", "none") != "none":
        raise ConfigError(f"bias={config.bias!r}: only adapters are trained in a swarm")
    if getattr(config, "use_dora", False):
        raise ConfigError("use_dora needs the base weights; nodes may hold them quantized")
    init = getattr(config, "init_lora_weights", True)
    if init not in (True, False, "gaussian"):
        raise ConfigError(f"init_lora_weights={init!r} needs the base weights; use True")
