"""Adapters as their authors may write them: PEFT's own, and files that are made to do harm."""

from __future__ import annotations

import json
import os
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nesa_node.core.errors import (
    CorruptCheckpointError,
    ModelError,
    ModelNotFoundError,
    UnsafeCheckpointError,
    UnsupportedModelError,
)
from nesa_node.core.ids import Span
from nesa_node.engine.adapters.peft_folder import (
    CONFIG_FILE,
    MAX_ADAPTER_CONFIG_BYTES,
    MAX_RANK,
    WEIGHTS_FILE,
    PeftFolder,
    parse_lora_config,
)
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks
from tests.engine.adapters.peft_models import ATTENTION, make_configs, save_adapters
from tests.engine.chained import open_local
from tests.engine.tiny_models import reference, save_tiny_model

# PEFT asks transformers by a name that will be removed, and says how it adapts a config.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys"),
]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
MAX_SECONDS = 2.0
"""Of refusing any file, on a busy machine."""


@pytest.fixture
def blocks(models_dir: Path) -> ModelBlocks:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    return load_blocks(checkpoint, Span(0, 2), dtype=torch.float32, device="cpu")


def make_tensors(rank: int = 4) -> dict[str, Tensor]:
    """An adapter of one layer of the tiny Llama, which has 64 inputs and 128 outputs."""
    return {
        f"{FIRST}.lora_A.weight": torch.ones(rank, 64),
        f"{FIRST}.lora_B.weight": torch.ones(128, rank),
    }


def save(folder: Path, config: object = PLAIN, tensors: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file(make_tensors() if tensors is None else tensors, folder / WEIGHTS_FILE)
    return folder


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "bloom", "phi3"])
def test_ranks_and_scales_are_those_of_peft(family: str, models_dir: Path, tmp_path: Path) -> None:
    model = save_tiny_model(family, models_dir)
    checkpoint = open_local(model)
    layout = load_blocks(checkpoint, Span(0, 6), dtype=torch.float32, device="cpu").adapter_layout
    for folder in save_adapters(model, make_configs(family), tmp_path):
        theirs: Any = peft.PeftModel.from_pretrained(reference(model), folder)
        expected = {
            name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
            for name, module in theirs.named_modules()
            if hasattr(module, "lora_A")
        }
        found = PeftFolder.open(folder).modules(
            layout.layers_path, layout.num_blocks, layout.layer_names
        )
        assert expected == {
            f"{layout.layers_path}.{block}.{name}": (lora.rank, lora.scale)
            for (block, name), lora in found.items()
        }


@pytest.mark.parametrize("is_turned", [True, False])
def test_layers_that_hold_their_weights_turned(
    is_turned: bool, models_dir: Path, tmp_path: Path
) -> None:
    """GPT-2's do; PEFT's matrices have the same shapes, whatever the config says."""
    model = save_tiny_model("gpt2", models_dir)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=is_turned)
    [folder] = save_adapters(model, [config], tmp_path)
    blocks = load_blocks(open_local(model), Span(0, 2), dtype=torch.float32, device="cpu")
    adapter = blocks.load_adapter(folder)
    product = adapter.product_of(1, 0)
    assert product is not None
    tensors = load_file(folder / WEIGHTS_FILE)
    path = "base_model.model.transformer.h.1.attn.c_attn"
    assert torch.equal(product.a_RI[:2], tensors[f"{path}.lora_A.weight"])
    assert torch.equal(product.parts[0].b_rO.t(), tensors[f"{path}.lora_B.weight"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "of type 'IA3'"),
        (peft.LoraConfig(target_modules=ATTENTION, bias="all"), "bias='all'"),
        (peft.LoraConfig(target_modules=ATTENTION, use_dora=True), "'use_dora' is set"),
        (peft.LoraConfig(target_modules=ATTENTION, lora_bias=True), "'lora_bias' is set"),
        (peft.LoraConfig(target_modules=ATTENTION, modules_to_save=["norm"]), "'modules_to_save'"),
        (peft.LoraConfig(target_modules=[*ATTENTION, "lm_head"]), "no matrix of a LoRA adapter"),
        (peft.LoraConfig(target_modules=["embed_tokens"]), "is no matrix of a LoRA adapter"),
        (peft.LoraConfig(target_modules=ATTENTION, init_lora_weights="pissa"), "'pissa' changes"),
        (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "'PROMPT_TUNING'"),
    ],
)
def test_what_peft_saves_and_nodes_do_not_serve(
    config: Any, said: str, models_dir: Path, tmp_path: Path, blocks: ModelBlocks
) -> None:
    model = save_tiny_model("llama", models_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what PEFT thinks of these configs
        adapted: Any = peft.get_peft_model(reference(model), config)
        adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedModelError, match=said):
        blocks.load_adapter(tmp_path / "adapter")


def test_experts_of_a_mixture_are_refused(models_dir: Path, tmp_path: Path) -> None:
    model = save_tiny_model("mixtral", models_dir)
    [folder] = save_adapters(model, [peft.LoraConfig(target_modules="all-linear")], tmp_path)
    blocks = load_blocks(open_local(model), Span(0, 1), dtype=torch.float32, device="cpu")
    with pytest.raises(UnsupportedModelError, match="'target_parameters' is set"):
        blocks.load_adapter(folder)


def test_an_adapter_of_another_model_is_refused(models_dir: Path, tmp_path: Path) -> None:
    model = save_tiny_model("llama", models_dir)
    [folder] = save_adapters(model, [peft.LoraConfig(target_modules=ATTENTION)], tmp_path)
    for other, error, said in (
        ("gpt2", UnsupportedModelError, "no linear layer of the model's 6 blocks"),
        ("qwen2", CorruptCheckpointError, "it was made for another model"),
    ):
        path = save_tiny_model(other, models_dir)
        blocks = load_blocks(open_local(path), Span(0, 1), dtype=torch.float32, device="cpu")
        with pytest.raises(error, match=said):
            blocks.load_adapter(folder)


CONFIGS: list[tuple[object, str]] = [
    ([], "is no JSON object"),
    ({}, "of type None"),
    ({**PLAIN, "peft_type": ["LORA"]}, "of type .'LORA'."),
    ({**PLAIN, "r": 0}, "0 is no rank"),
    ({**PLAIN, "r": True}, "True is no rank"),
    ({**PLAIN, "r": "4"}, "'4' is no rank"),
    ({**PLAIN, "r": MAX_RANK + 1}, f"rank {MAX_RANK + 1}; at most {MAX_RANK}"),
    ({**PLAIN, "r": 10**4000}, "at most 1024"),
    ({**PLAIN, "lora_alpha": 10**400}, "is no lora_alpha"),
    ({**PLAIN, "lora_alpha": float("inf")}, "inf is no lora_alpha"),
    ({**PLAIN, "lora_alpha": float("nan")}, "nan is no lora_alpha"),
    ({**PLAIN, "lora_alpha": None}, "None is no lora_alpha"),
    ({**PLAIN, "use_rslora": "yes"}, "use_rslora is 'yes'"),
    ({**PLAIN, "rank_pattern": ["q_proj"]}, "a pattern is no object"),
    ({**PLAIN, "rank_pattern": {"q_proj": 2.0}}, "2.0 is no rank"),
    ({**PLAIN, "alpha_pattern": {"q_proj": "8"}}, "'8' is no lora_alpha"),
    ({**PLAIN, "rank_pattern": {str(n): 1 for n in range(3000)}}, "a pattern is no object"),
    ({**PLAIN, "rank_pattern": {f"{n}*": 1 for n in range(33)}}, "33 regular expressions"),
    ({**PLAIN, "rank_pattern": {"q" * 300: 1}}, "is too long"),
    ({**PLAIN, "rank_pattern": {"(a+)+b": 1}}, "groups"),
    ({**PLAIN, "rank_pattern": {"(a|a)" * 30: 1}}, "groups"),
    ({**PLAIN, "rank_pattern": {".*.*.*x": 1}}, "more than 2 of"),
    ({**PLAIN, "rank_pattern": {"a{9999}": 1}}, "are not served"),
    ({**PLAIN, "rank_pattern": {"[": 1}}, "unterminated character set"),
    ({**PLAIN, "init_lora_weights": {"a": 1}}, "init_lora_weights=.'a': 1."),
    ({**PLAIN, "alora_invocation_tokens": [1]}, "'alora_invocation_tokens' is set"),
    ({**PLAIN, "from a later version": 0.1}, "'from a later version' is set"),
]


@pytest.mark.parametrize(("config", "said"), CONFIGS)
def test_configs_that_are_refused(config: object, said: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "adapter", config)
    started = time.perf_counter()
    with pytest.raises(ModelError, match=said) as raised:
        PeftFolder.open(folder)
    assert time.perf_counter() - started < MAX_SECONDS
    assert len(str(raised.value)) < 1000


def test_patterns_take_no_longer_than_modules(tmp_path: Path, blocks: ModelBlocks) -> None:
    """The worst that is accepted: keys that fail late, and as many of them as there may be."""
    patterns: dict[str, int] = {f".*.*q_pro{n:02}": 1 for n in range(32)}
    patterns |= {f"{'.' * 30}q_pro{n:04}": 1 for n in range(2000)}
    tensors = {
        f"base_model.model.model.layers.{block}.{name}.lora_{side}.weight": value
        for block in range(6)
        for name, (inputs, outputs) in {"self_attn.q_proj": (64, 128)}.items()
        for side, value in (("A", torch.ones(4, inputs)), ("B", torch.ones(outputs, 4)))
    }
    config = {**PLAIN, "rank_pattern": patterns, "alpha_pattern": patterns}
    folder = save(tmp_path / "adapter", config, tensors)
    started = time.perf_counter()
    assert blocks.load_adapter(folder).max_rows == 4
    assert time.perf_counter() - started < MAX_SECONDS


Change = Callable[[dict[str, Tensor]], object]
TENSORS: list[tuple[Change, type[ModelError], str]] = [
    (lambda t: t.clear(), CorruptCheckpointError, "holds no tensors"),
    (lambda t: t.pop(f"{FIRST}.lora_B.weight"), CorruptCheckpointError, "one of its two"),
    (
        lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(5, 64)}),
        CorruptCheckpointError,
        "the config makes their rank 4",
    ),
    (
        lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(4, 64, 1)}),
        CorruptCheckpointError,
        "the config makes their rank 4",
    ),
    (
        lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(4, 65)}),
        CorruptCheckpointError,
        "has 64 inputs and 128 outputs, its adapter 65 and 128",
    ),
    (
        lambda t: t.update({f"{FIRST}.lora_B.weight": torch.ones(1 << 20, 4)}),
        CorruptCheckpointError,
        "its adapter 64 and 1048576",
    ),
    (lambda t: t[f"{FIRST}.lora_A.weight"][3, 9:10].fill_(torch.nan), CorruptCheckpointError, "no"),
    (
        lambda t: t[f"{FIRST}.lora_B.weight"][100, 3:].fill_(-torch.inf),
        CorruptCheckpointError,
        "values that are not finite in float32",
    ),
    (
        lambda t: t.update({name: value.double() for name, value in t.items()}),
        UnsupportedModelError,
        "is torch.float64",
    ),
    (
        lambda t: t.update({name: value.char() for name, value in t.items()}),
        UnsupportedModelError,
        "is torch.int8",
    ),
    *(
        (
            lambda t, name=name: t.update({name: torch.ones(4, 64)}),
            UnsupportedModelError,
            said,
        )
        for name, said in (
            (f"{FIRST}.lora_magnitude_vector", "no matrix of a LoRA adapter"),
            (f"{FIRST}.weight", "no matrix of a LoRA adapter"),
            ("model.layers.0.self_attn.q_proj.lora_A.weight", "no matrix of a LoRA adapter"),
            (FIRST.replace(".0.", ".6.") + ".lora_A.weight", "no linear layer"),
            (FIRST.replace(".0.", ".00.") + ".lora_A.weight", "no linear layer"),
            (FIRST.replace(".0.", ".-1.") + ".lora_A.weight", "no linear layer"),
            (FIRST.replace(".0.", f".{'9' * 5000}.") + ".lora_A.weight", "no linear layer"),
            (FIRST.replace("q_proj", "__class__") + ".lora_A.weight", "no linear layer"),
            ("base_model.model.lm_head.lora_A.weight", "adapts 'lm_head'"),
        )
    ),
]


@pytest.mark.parametrize(("change", "error", "said"), TENSORS)
def test_tensors_that_are_refused(
    change: Change, error: type[ModelError], said: str, tmp_path: Path, blocks: ModelBlocks
) -> None:
    tensors = make_tensors()
    change(tensors)
    folder = save(tmp_path / "adapter", tensors=tensors)
    started = time.perf_counter()
    with pytest.raises(error, match=said) as raised:
        blocks.load_adapter(folder)
    assert time.perf_counter() - started < MAX_SECONDS
    assert len(str(raised.value)) < 1000


def test_values_beyond_the_dtype_of_activations_are_refused(
    models_dir: Path, tmp_path: Path
) -> None:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    blocks = load_blocks(checkpoint, Span(0, 1), dtype=torch.float16, device="cpu")
    tensors = {name: value * 1e5 for name, value in make_tensors().items()}
    with pytest.raises(CorruptCheckpointError, match="not finite in float16"):
        blocks.load_adapter(save(tmp_path / "adapter", tensors=tensors))


def write_header(folder: Path, entries: object, *, data: int = 0) -> Path:
    header = json.dumps(entries).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(data)
    (folder / WEIGHTS_FILE).write_bytes(content)
    return folder


def test_headers_that_claim_more_than_the_file_has(tmp_path: Path, blocks: ModelBlocks) -> None:
    """Nothing of what they claim is allocated."""
    folder = save(tmp_path / "adapter")
    names = list(make_tensors())
    for shape, begin, end in (
        ([4, 1 << 40], 0, 4 << 42),
        ([4, 64], 0, 1024),
        ([4, 64], -1024, 0),
        ([4, -64], 0, 1024),
        ([4, 64], 0, 512),
    ):
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        write_header(folder, dict.fromkeys(names, entry), data=512)
        with pytest.raises(CorruptCheckpointError):
            blocks.load_adapter(folder)
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CorruptCheckpointError, match="its header claims"):
        blocks.load_adapter(folder)


def test_sizes_are_limited_before_anything_is_read(tmp_path: Path, blocks: ModelBlocks) -> None:
    folder = save(tmp_path / "adapter")
    assert blocks.load_adapter(folder, max_bytes=1 << 16).max_rows == 4
    with pytest.raises(UnsupportedModelError, match="adapters of at most 0 MiB are served here"):
        blocks.load_adapter(folder, max_bytes=1 << 10)
    with (folder / WEIGHTS_FILE).open("r+b") as stream:
        stream.truncate(1 << 40)  # of which no byte is on the disk
    with pytest.raises(
        UnsupportedModelError, match=r"has 1048576\.0 MiB; adapters of at most 4096"
    ):
        blocks.load_adapter(folder)
    (folder / CONFIG_FILE).write_bytes(b" " * (MAX_ADAPTER_CONFIG_BYTES + 1))
    with pytest.raises(CorruptCheckpointError, match="more than 1 MiB, more than any config"):
        blocks.load_adapter(folder)


def test_a_small_file_takes_no_more_memory_than_allowed(
    tmp_path: Path, blocks: ModelBlocks
) -> None:
    """Tensors of a header may share their bytes."""
    folder = save(tmp_path / "adapter", {**PLAIN, "r": MAX_RANK})
    nbytes = 4 * MAX_RANK * 128
    entries = {
        f"base_model.model.model.layers.{block}.self_attn.{name}.lora_{side}.weight": {
            "dtype": "F32",
            "shape": [MAX_RANK, inputs] if side == "A" else [outputs, MAX_RANK],
            "data_offsets": [0, 4 * MAX_RANK * (inputs if side == "A" else outputs)],
        }
        for block in range(6)
        for name, (inputs, outputs) in {"q_proj": (64, 128), "k_proj": (64, 64)}.items()
        for side in "AB"
    }
    write_header(folder, entries, data=nbytes)
    assert (folder / WEIGHTS_FILE).stat().st_size < 1 << 20
    with pytest.raises(UnsupportedModelError, match=r"takes 2\.5 MiB for blocks 0:2"):
        blocks.load_adapter(folder, max_bytes=1 << 20)


def test_files_that_are_missing_or_no_files(tmp_path: Path, blocks: ModelBlocks) -> None:
    folder = tmp_path / "adapter"
    with pytest.raises(ModelNotFoundError, match="an adapter's folder holds"):
        blocks.load_adapter(folder)
    save(folder)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ModelNotFoundError, match=f"has no {WEIGHTS_FILE}"):
        blocks.load_adapter(folder)
    (folder / "adapter_model.bin").touch()
    with pytest.raises(UnsafeCheckpointError, match="can run code"):
        blocks.load_adapter(folder)
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises((ModelNotFoundError, UnsafeCheckpointError)):
            blocks.load_adapter(folder)


def test_a_file_that_ends_early_is_refused(tmp_path: Path, blocks: ModelBlocks) -> None:
    folder = save(tmp_path / "adapter")
    source = PeftFolder.open(folder)
    with (folder / WEIGHTS_FILE).open("r+b") as stream:
        stream.truncate(600)
    with pytest.raises(CorruptCheckpointError, match="ended early"):
        blocks.load_adapter(source)


def test_keys_of_patterns_match_the_end_of_a_path_as_in_peft() -> None:
    config = parse_lora_config(
        {
            **PLAIN,
            "rank_pattern": {
                "self.attn.k_proj": 2,
                "layers.1.self_attn.q_proj": 3,
                "attn.q_proj": 5,
                "_proj": 6,
                "v_proj|o_proj": 7,
                "^mlp.*": 8,
                r"layers\.[0-9]+\.mlp\..*": 9,
            },
        },
        where="here",
    )
    for path, rank in {
        "model.layers.0.self_attn.k_proj": 2,
        "model.layers.1.self_attn.q_proj": 3,
        "model.layers.11.self_attn.q_proj": 4,
        "model.layers.2.self_attn.v_proj": 7,
        "model.layers.2.mlp.up_proj": 9,
        "attn.q_proj": 5,
        "mlp.up_proj": 8,
    }.items():
        keys = list(config.rank_pattern)
        key = peft.utils.other.get_pattern_key(keys, path)
        assert config.rank_pattern.get(key, 4) == rank
        assert config.resolve(path) == (rank, 8 / rank)
