"""What is trained, as a client tells it to nodes: adapters, optimizer and seed, in bounded fields.

A spec comes from a stranger. Names in it are plain, since PEFT uses some of them as patterns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nesa_node.core.errors import ConfigError
from nesa_node.engine.training.adapters import (
    BottleneckConfig,
    DeepPromptConfig,
    FullConfig,
    OptimizerConfig,
    require_supported,
)

if TYPE_CHECKING:
    from peft import IA3Config, LoraConfig, PeftConfig

    AdapterConfig = PeftConfig | BottleneckConfig | DeepPromptConfig | FullConfig

MAX_RANK = 1024
MAX_MODULES = 1024
ALL_LINEAR = "all-linear"

MAX_PATTERNS = 128
"""Modules with a rank or alpha of their own. PEFT makes a pattern of each and tries it on every
module of the model; Python keeps 512 compiled patterns, and with more would compile each again."""

_NAME_PATTERN = r"\A[A-Za-z0-9_.-]+\Z"
ModuleName = Annotated[str, Meta(min_length=1, max_length=256, pattern=_NAME_PATTERN)]
ModuleNames = Annotated[tuple[ModuleName, ...], Meta(max_length=MAX_MODULES)]
Rank = Annotated[int, Meta(ge=1, le=MAX_RANK)]
Alpha = Annotated[float, Meta(gt=0, le=1e6)]
LayerIndex = Annotated[int, Meta(ge=0, le=1 << 16)]


class LoraSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields of `peft.LoraConfig`, by PEFT's names where these are not patterns there."""

    r: Rank
    lora_alpha: Alpha
    modules: ModuleNames = ()
    """Empty: PEFT's choice for the model's family. ("all-linear",): all linear layers."""
    exclude_modules: ModuleNames = ()
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | Literal["gaussian"] = True
    layers_to_transform: Annotated[tuple[LayerIndex, ...], Meta(max_length=1024)] = ()
    rank_pattern: Annotated[dict[ModuleName, Rank], Meta(max_length=MAX_PATTERNS)] = {}
    alpha_pattern: Annotated[dict[ModuleName, Alpha], Meta(max_length=MAX_PATTERNS)] = {}

    @property
    def max_rank(self) -> int:
        return max(self.r, *self.rank_pattern.values()) if self.rank_pattern else self.r

    def make_config(self) -> LoraConfig:
        from peft import LoraConfig

        return LoraConfig(
            r=self.r,
            lora_alpha=self.lora_alpha,  # type: ignore[arg-type]  # PEFT computes with any number
            target_modules=_to_peft_names(self.modules),
            exclude_modules=list(self.exclude_modules) or None,
            lora_dropout=self.lora_dropout,
            use_rslora=self.use_rslora,
            fan_in_fan_out=self.fan_in_fan_out,
            init_lora_weights=self.init_lora_weights,
            layers_to_transform=list(self.layers_to_transform) or None,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
        )


class Ia3Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields of `peft.IA3Config`."""

    modules: ModuleNames = ()
    """Empty: PEFT's choice for the model's family."""
    feedforward_modules: ModuleNames = ()
    fan_in_fan_out: bool = False
    init_ia3_weights: bool = True

    def make_config(self) -> IA3Config:
        from peft import IA3Config

        return IA3Config(
            target_modules=_to_peft_names(self.modules),
            feedforward_modules=list(self.feedforward_modules) or None,
            fan_in_fan_out=self.fan_in_fan_out,
            init_ia3_weights=self.init_ia3_weights,
        )


class TrainingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One kind of adapters, or none: then the blocks pass gradients to the client's own.

    Or, in place of adapters, the blocks' weights.
    """

    optimizer: OptimizerConfig
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """Of initial values."""
    lora: LoraSpec | None = None
    ia3: Ia3Spec | None = None
    bottleneck: BottleneckConfig | None = None
    deep_prompt: DeepPromptConfig | None = None
    full: FullConfig | None = None

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> TrainingSpec:
        """Raises `ConfigError` for what is not one spec within its bounds."""
        try:
            spec = _decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ConfigError(f"no training spec: {str(error)[:200]}") from None
        kinds = (spec.lora, spec.ia3, spec.bottleneck, spec.deep_prompt, spec.full)
        if sum(kind is not None for kind in kinds) > 1:
            raise ConfigError("a training spec has one kind of adapters")
        return spec

    def make_config(self) -> AdapterConfig | None:
        """Config of the adapters; None without any. Raises `ConfigError` for what PEFT refuses."""
        made = self.lora or self.ia3
        own = self.bottleneck or self.deep_prompt or self.full
        try:
            return made.make_config() if made is not None else own
        except (ValueError, TypeError) as error:
            raise ConfigError(f"PEFT refuses this adapter: {error}") from None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TrainingSpec)


def make_spec(
    config: AdapterConfig | None,
    optimizer: OptimizerConfig,
    seed: int,
    *,
    find_modules: Callable[[], Iterable[str]],
) -> TrainingSpec:
    """Make the spec that tells nodes of `config`.

    `find_modules` returns the names of the model's modules, among which a pattern of the config is
    looked up. Raises `ConfigError` for what nodes do not train.
    """
    if config is None:
        return TrainingSpec(optimizer=optimizer, seed=seed)
    if isinstance(config, BottleneckConfig):
        return TrainingSpec(optimizer=optimizer, seed=seed, bottleneck=config)
    if isinstance(config, DeepPromptConfig):
        return TrainingSpec(optimizer=optimizer, seed=seed, deep_prompt=config)
    if isinstance(config, FullConfig):
        return TrainingSpec(optimizer=optimizer, seed=seed, full=config)
    require_supported(config)
    fields = _read_fields(config, find_modules)
    kind = "lora" if "lora_alpha" in fields else "ia3"
    given = {"optimizer": msgspec.to_builtins(optimizer), "seed": seed, kind: fields}
    try:
        return msgspec.convert(given, TrainingSpec, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"nodes do not train such an adapter: {error}") from None


def _read_fields(config: Any, find_modules: Callable[[], Iterable[str]]) -> dict[str, Any]:
    wanted = LoraSpec if hasattr(config, "lora_alpha") else Ia3Spec
    fields: dict[str, Any] = {
        name: value
        for name in wanted.__struct_fields__
        if name != "modules" and (value := getattr(config, name)) is not None
    }
    _require_plain(config, fields)
    fields["modules"] = _from_peft_names(config.target_modules, find_modules)
    for name in ("exclude_modules", "feedforward_modules"):
        if name in fields:
            fields[name] = _from_peft_names(fields[name], find_modules)
    if "layers_to_transform" in fields:
        layers = fields["layers_to_transform"]
        fields["layers_to_transform"] = [layers] if isinstance(layers, int) else list(layers)
    return fields


_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "layers_pattern": (None, [], ""),
    "layer_replication": (None, []),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "megatron_config": (None,),
}
"""Fields of PEFT's configs that nodes do not know, with the values that change nothing."""


def _require_plain(config: Any, fields: Mapping[str, Any]) -> None:
    for name, allowed in _DEFAULTS.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            raise ConfigError(f"{name}={value!r}: nodes do not train such an adapter")
    for name in ("rank_pattern", "alpha_pattern"):
        for key in fields.get(name, {}):
            if not re.fullmatch(_NAME_PATTERN, key):
                raise ConfigError(
                    f"{name} has {key!r}: nodes take names of modules there, no patterns"
                )


def _from_peft_names(names: Any, find_modules: Callable[[], Iterable[str]]) -> list[str]:
    """Names of modules; a text is a pattern, except for "all-linear"."""
    if names is None:
        return []
    if names == ALL_LINEAR:
        return [ALL_LINEAR]
    if not isinstance(names, str):
        return sorted(names)
    found = [name for name in find_modules() if re.fullmatch(names, name)]
    if not found:
        raise ConfigError(f"target_modules={names!r} fits no module of the model")
    return found


def _to_peft_names(names: ModuleNames) -> list[str] | str | None:
    if names == (ALL_LINEAR,):
        return ALL_LINEAR
    return list(names) or None
