"""Gradients of adapters through a model cut into spans, against PEFT in one process."""

from __future__ import annotations

import copy
import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import initialization as transformers_init

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.kernels.quantized_linear import is_quantizable, make_quantized_linear
from nesa_node.engine.model.loading import detach_span
from nesa_node.engine.training import adapted_blocks
from nesa_node.engine.training.adapted_blocks import (
    AdaptedBlocks,
    MicroBatch,
    count_adapter_values,
    find_adapter_shapes,
    find_served_modules,
)
from nesa_node.engine.training.adapters import (
    BottleneckConfig,
    DeepPromptConfig,
    FullConfig,
    OptimizerConfig,
)
from nesa_node.engine.training.training_spec import TrainingSpec
from nesa_node.engine.weights.model_tree import initializer_lock
from tests.engine.chained import Chain, Run, distance, open_local
from tests.engine.their_layers import quantize_experts
from tests.engine.tiny_models import FAMILIES, prompt_ids, reference, save_tiny_model

# PEFT asks transformers by a name that will be removed, and says how it adapts a config.
PEFT_WARNINGS = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys"),
]
pytestmark = PEFT_WARNINGS
SEED = 5
FROM_TREE = "granite"
"""A type that is in no table, and scales in its decoder what a block gets from the client."""
_FEED_FORWARD = ["down_proj", "dense_4h_to_h", "fc2", "mlp.c_proj"]
_KEYS = ["k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"]
CONFIGS: dict[str, Any] = {
    "lora": peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False
    ),
    "ia3": peft.IA3Config(
        target_modules=_KEYS + _FEED_FORWARD,
        feedforward_modules=_FEED_FORWARD,
        init_ia3_weights=False,
    ),
}


def remove_dropout(folder: Path, target: Path) -> Path:
    """Return a copy of a model without dropout, which no cut into spans draws alike."""
    copied = Path(shutil.copytree(folder, target / folder.name))
    config = json.loads((copied / "config.json").read_text())
    config |= {name: 0.0 for name in config if "dropout" in name or name.endswith("_pdrop")}
    (copied / "config.json").write_text(json.dumps(config))
    return copied


def make_batch() -> Tensor:
    return torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))


def train_reference(folder: Path, config: Any, ids_RL: Tensor) -> tuple[dict[str, Tensor], float]:
    """Gradients by the names of PEFT's files, and the loss."""
    model = reference(folder).float()
    torch.manual_seed(SEED)
    adapted: Any = peft.get_peft_model(model, config)
    adapted.train()
    loss = adapted(input_ids=ids_RL, labels=ids_RL, use_cache=False).loss
    loss.backward()
    found = {
        name.replace(".default", ""): value.grad
        for name, value in adapted.named_parameters()
        if value.requires_grad
    }
    return found, float(loss.detach())


def collect_gradients(spans: list[AdaptedBlocks]) -> dict[str, Tensor]:
    found = {}
    for span in spans:
        for name, value in span.parameters.items():
            assert value.grad is not None, name
            found[name] = value.grad
    return found


def run_forward(span: AdaptedBlocks, hidden_RLD: Tensor, batch: MicroBatch) -> Tensor:
    for index in range(span.span.start, span.span.end):
        hidden_RLD = span.run_block(index, hidden_RLD, batch)
    return hidden_RLD


def run_spans(
    chain: Chain, spans: list[AdaptedBlocks], ids_RL: Tensor, batch: MicroBatch
) -> tuple[dict[str, Tensor], float]:
    positions_RL = torch.arange(ids_RL.shape[1]).expand_as(ids_RL)
    inputs = [chain.embedder.embed_batch(ids_RL, positions_RL)]
    for span in spans:
        with torch.no_grad():
            inputs.append(run_forward(span, inputs[-1], batch))
    output_RLD = inputs[-1].requires_grad_()
    logits_RLV = chain.head.logits_with_gradients(output_RLD)
    loss = torch.nn.functional.cross_entropy(
        logits_RLV[:, :-1].flatten(0, 1), ids_RL[:, 1:].flatten()
    )
    [grad_RLD] = torch.autograd.grad(loss, output_RLD)
    for span, hidden_RLD in zip(reversed(spans), reversed(inputs[:-1]), strict=True):
        with torch.enable_grad():
            output_RLD = run_forward(span, start_RLD := hidden_RLD.detach().requires_grad_(), batch)
        torch.autograd.backward(output_RLD, grad_RLD)
        assert start_RLD.grad is not None
        grad_RLD = start_RLD.grad
    return collect_gradients(spans), float(loss.detach())


def adapt(chain: Chain, folder: Path, config: Any = CONFIGS["lora"]) -> list[AdaptedBlocks]:
    checkpoint = open_local(folder)
    return [AdaptedBlocks(span, checkpoint, config, seed=SEED) for span in chain.blocks]


def dequantized_copy(folder: Path, quant_type: QuantType, target: Path) -> Path:
    """Return a copy of a model whose blocks have the weights that quantized layers compute with."""
    model = reference(folder).float()
    for layer in model.model.layers:
        for module in layer.modules():
            if is_quantizable(module):
                quantized = make_quantized_linear(
                    module,
                    module.weight.data,
                    quant_type,
                    dtype=torch.float32,
                    device=torch.device("cpu"),
                )
                module.weight.data = quantized.dequantize(torch.float32)
            quantize_experts(module, quant_type)
    model.save_pretrained(target)
    return target


@pytest.mark.parametrize("family", [*FAMILIES, FROM_TREE])
@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_gradients_are_those_of_peft(
    family: str, kind: str, models_dir: Path, tmp_path: Path
) -> None:
    folder = remove_dropout(save_tiny_model(family, models_dir), tmp_path)
    ids_RL, config = make_batch(), CONFIGS[kind]
    expected, loss = train_reference(folder, copy.deepcopy(config), ids_RL)
    chain = Chain(folder)
    found, found_loss = run_spans(chain, adapt(chain, folder, config), ids_RL, MicroBatch(0))
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert distance(found[name], value) < 1e-5, name


@pytest.mark.parametrize("family", [*FAMILIES, FROM_TREE])
def test_gradients_of_the_weights_themselves(family: str, models_dir: Path, tmp_path: Path) -> None:
    folder = remove_dropout(save_tiny_model(family, models_dir), tmp_path)
    ids_RL = make_batch()
    chain = Chain(folder)
    found, found_loss = run_spans(chain, adapt(chain, folder, FullConfig()), ids_RL, MicroBatch(0))
    model = reference(folder).float().train()
    layers: Any = model.get_submodule(open_local(folder).family.layers_path)
    layers.requires_grad_(True)
    loss = model(input_ids=ids_RL, labels=ids_RL, use_cache=False).loss
    loss.backward()
    prefix = open_local(folder).family.layers_path
    expected = {f"{prefix}.{name}": value.grad for name, value in layers.named_parameters()}
    assert found_loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert value is not None
        assert distance(found[name], value) < 2e-5, name
    shapes = find_adapter_shapes(open_local(folder), FullConfig(), Span(0, 6))
    assert shapes == {name: tuple(value.shape) for name, value in found.items()}


def test_trained_weights_are_a_copy(models_dir: Path) -> None:
    """What the node serves stays, and may be quantized."""
    folder = save_tiny_model("llama", models_dir)
    [served] = Chain(folder, spans=[Span(0, 6)], quant_type="int8").blocks
    before = [part for layer in served.split_layers() for part in layer.values()]
    kept = [copy.deepcopy(part) for part in before]
    span = AdaptedBlocks(served, open_local(folder), FullConfig("bfloat16"), seed=SEED)
    assert span.dtype == torch.bfloat16
    for value in span.parameters.values():
        assert value.dtype == torch.bfloat16
        value.data.zero_()
    for part, was in zip(before, kept, strict=True):
        if isinstance(part, nn.Module) and isinstance(was, nn.Module):
            assert all(
                torch.equal(a, b)
                for a, b in zip(part.state_dict().values(), was.state_dict().values(), strict=True)
                if isinstance(a, Tensor)
            )
    spec = TrainingSpec(OptimizerConfig(), 0, full=FullConfig())
    numbers = sum(value.numel() for value in span.parameters.values())
    assert count_adapter_values(served, spec) >= numbers


def randomize(spans: list[AdaptedBlocks]) -> None:
    """Change adapters that do nothing at first, so that all their parameters have gradients."""
    generator = torch.Generator().manual_seed(4)
    for span in spans:
        for value in span.parameters.values():
            value.data += 0.1 * torch.randn(value.shape, generator=generator)


@pytest.mark.parametrize("norm", ["before", "printed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_bottleneck_adapters(
    family: str, norm: Any, models_dir: Path, tmp_path: Path
) -> None:
    folder = remove_dropout(save_tiny_model(family, models_dir), tmp_path)
    chain, ids_RL = Chain(folder), make_batch()
    spans = adapt(chain, folder, BottleneckConfig(size=8, activation="silu", norm=norm))
    randomize(spans)
    found, loss = run_spans(chain, spans, ids_RL, MicroBatch(0))

    def adapt_output(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
        def normed(x: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            scale = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            return centred * scale * weights["norm.weight"] + weights["norm.bias"]

        inner = (normed(hidden) if norm == "before" else hidden) @ weights["down.weight"].t()
        inner = inner + weights["down.bias"]
        delta = (inner * inner.sigmoid()) @ weights["up.weight"].t() + weights["up.bias"]
        return normed(hidden + delta) if norm == "printed" else hidden + delta

    expected = compute_by_hooks(folder, spans, ids_RL, "bottleneck", change_output=adapt_output)
    assert loss == pytest.approx(expected.pop("loss"), rel=1e-5)
    assert set(expected) == set(found)
    # Norms of outputs that differ in size by orders of magnitude: the reference itself is 1.6e-4
    # from its own gradients in float64 (BLOOM).
    limit = 5e-4 if norm == "printed" else 1e-5
    for name, value in expected.items():
        assert distance(found[name], value) < limit, name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_deep_prompts(family: str, models_dir: Path, tmp_path: Path) -> None:
    folder = remove_dropout(save_tiny_model(family, models_dir), tmp_path)
    chain, ids_RL = Chain(folder), make_batch()
    spans = adapt(chain, folder, DeepPromptConfig(5))
    randomize(spans)
    found, loss = run_spans(chain, spans, ids_RL, MicroBatch(0))

    def add_prompt(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
        return hidden + nn.functional.pad(weights["prompt"], (0, 0, 0, hidden.shape[1] - 5))

    expected = compute_by_hooks(folder, spans, ids_RL, "deep_prompt", change_input=add_prompt)
    assert loss == pytest.approx(expected.pop("loss"), rel=1e-5)
    assert set(expected) == set(found)
    assert all(distance(found[name], value) < 1e-5 for name, value in expected.items())


Change = Callable[[dict[str, Tensor], Tensor], Tensor]


def compute_by_hooks(
    folder: Path,
    spans: list[AdaptedBlocks],
    ids_RL: Tensor,
    title: str,
    *,
    change_input: Change | None = None,
    change_output: Change | None = None,
) -> dict[str, Any]:
    """Gradients of the same parameters in one model of transformers, and "loss"."""
    model, checkpoint = reference(folder).float(), open_local(folder)
    values = {
        name: value.detach().clone().requires_grad_()
        for span in spans
        for name, value in span.parameters.items()
    }
    for index, layer in enumerate(model.get_submodule(checkpoint.family.layers_path)):
        prefix = f"base_model.model.{checkpoint.family.layers_path}.{index}.{title}."
        own = {
            name.removeprefix(prefix): value
            for name, value in values.items()
            if name.startswith(prefix)
        }
        if change_input is not None:
            layer.register_forward_pre_hook(
                lambda _, args, own=own: (change_input(own, args[0]), *args[1:])
            )
        if change_output is not None:
            layer.register_forward_hook(
                lambda _m, _a, out, own=own: (
                    (change_output(own, out[0]), *out[1:])
                    if isinstance(out, tuple)
                    else change_output(own, out)
                )
            )
    loss = model(input_ids=ids_RL, labels=ids_RL, use_cache=False).loss
    loss.backward()
    return {name: value.grad for name, value in values.items()} | {"loss": float(loss.detach())}


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_over_quantized_weights(
    family: str, quant_type: QuantType, models_dir: Path, tmp_path: Path
) -> None:
    folder, ids_RL, config = save_tiny_model(family, models_dir), make_batch(), CONFIGS["lora"]
    chain = Chain(folder, quant_type=quant_type)
    dequantized = dequantized_copy(folder, quant_type, tmp_path / "dequantized")
    expected, _ = train_reference(dequantized, copy.deepcopy(config), ids_RL)
    found, _ = run_spans(chain, adapt(chain, folder), ids_RL, MicroBatch(0))
    for name, value in expected.items():
        assert distance(found[name], value) < 2e-5, name


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_gradients_pass_through_quantized_experts(
    quant_type: QuantType, models_dir: Path, tmp_path: Path
) -> None:
    """Of adapters on what nodes serve adapters of: all but the experts and their router."""
    folder, ids_RL = save_tiny_model("mixtral", models_dir), make_batch()
    modules = find_served_modules(open_local(folder))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False)
    chain = Chain(folder, quant_type=quant_type)
    dequantized = dequantized_copy(folder, quant_type, tmp_path / "dequantized")
    expected, _ = train_reference(dequantized, copy.deepcopy(config), ids_RL)
    found, _ = run_spans(chain, adapt(chain, folder, config), ids_RL, MicroBatch(0))
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert distance(found[name], value) < 2e-5, name


def test_adapters_of_quantized_experts_are_refused(models_dir: Path) -> None:
    folder = save_tiny_model("mixtral", models_dir)
    chain = Chain(folder, quant_type="int8")
    config = peft.LoraConfig(r=4, target_parameters=["experts.down_proj"])
    with pytest.raises(ConfigError, match=r"experts.* in fewer bits"):
        adapt(chain, folder, config)
    spec = TrainingSpec(OptimizerConfig(), 0, full=FullConfig())
    weights = sum(
        math.prod(each)
        for each in find_adapter_shapes(
            open_local(folder), FullConfig(), chain.blocks[0].span
        ).values()
    )
    assert count_adapter_values(chain.blocks[0], spec) == weights


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_weights_are_in_memory_once_and_still_serve(family: str, models_dir: Path) -> None:
    folder, prompt = save_tiny_model(family, models_dir), prompt_ids(20)
    chain = Chain(folder)
    before = Run(chain).greedy(prompt, 12)
    served = {
        tensor.untyped_storage().data_ptr()
        for blocks in chain.blocks
        for module in blocks.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    spans = adapt(chain, folder)
    for span in spans:
        for decoder in span._decoders.values():
            for name, value in decoder.state_dict(keep_vars=True).items():
                if value.requires_grad:
                    continue
                assert value.untyped_storage().data_ptr() in served, name
    run_spans(chain, spans, make_batch(), MicroBatch(0))
    assert Run(chain).greedy(prompt, 12) == before


def test_dropout_is_the_same_on_any_cut_and_when_a_block_runs_again(models_dir: Path) -> None:
    folder, ids_RL = save_tiny_model("llama", models_dir), make_batch()
    config = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear")
    config.init_lora_weights = False
    found = []
    for spans in ([Span(0, 6)], [Span(0, 1), Span(1, 5), Span(5, 6)]):
        chain = Chain(folder, spans=spans)
        found.append(run_spans(chain, adapt(chain, folder, config), ids_RL, MicroBatch(7)))
    (whole, loss), (cut, cut_loss) = found
    assert cut_loss == pytest.approx(loss, rel=1e-6)
    assert all(distance(cut[name], value) < 1e-5 for name, value in whole.items())
    chain = Chain(folder)
    _, other_loss = run_spans(chain, adapt(chain, folder, config), ids_RL, MicroBatch(8))
    assert other_loss != pytest.approx(loss, rel=1e-4)
    # Each block's gradient is that of the output that it gave: two forwards are equal bit for bit.
    [span, *_] = adapt(chain, folder, config)
    hidden_RLD = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(2))
    first, second = (run_forward(span, hidden_RLD, MicroBatch(7)) for _ in range(2))
    assert torch.equal(first, second)


def test_the_random_numbers_of_the_process_are_left_alone(models_dir: Path) -> None:
    chain = Chain(folder := save_tiny_model("llama", models_dir))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    run_spans(chain, adapt(chain, folder), make_batch(), MicroBatch(7))
    assert torch.equal(torch.rand(4), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompted", [False, True], ids=["lora", "deep_prompt"])
def test_padding_and_packed_texts(
    family: str, prompted: bool, models_dir: Path, tmp_path: Path
) -> None:
    folder = remove_dropout(save_tiny_model(family, models_dir), tmp_path)
    [blocks] = (chain := Chain(folder, spans=[Span(0, 6)])).blocks
    config = DeepPromptConfig(4) if prompted else None
    span = AdaptedBlocks(blocks, open_local(folder), config, seed=SEED)
    randomize([span])
    ids_L = make_batch()[0]
    hidden_1LD = chain.embedder.embed_batch(ids_L[None], torch.arange(24)[None])
    alone = (
        run_forward(span, hidden_1LD[:, :9], MicroBatch(0)),
        run_forward(span, hidden_1LD[:, 9:], MicroBatch(0)),
    )
    positions_1L = torch.tensor([[*range(9), *range(15)]])
    packed = run_forward(span, hidden_1LD, MicroBatch(0, positions_RL=positions_1L))
    assert distance(packed, torch.cat(alone, 1)) < 1e-5
    padded_RLD = torch.zeros(2, 15, 64)
    padded_RLD[0, :9], padded_RLD[1] = hidden_1LD[0, :9], hidden_1LD[0, 9:]
    mask_RL = torch.tensor([[1] * 9 + [0] * 6, [1] * 15])
    padded = run_forward(span, padded_RLD, MicroBatch(0, mask_RL=mask_RL))
    assert distance(padded[0, :9], alone[0][0]) < 1e-5
    assert distance(padded[1], alone[1][0]) < 1e-5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (peft.LoraConfig(target_modules=["nothing"]), "PEFT refuses this adapter: .*nothing"),
        (peft.LoraConfig(target_modules=["q_proj"], bias="all"), "bias='all'"),
        (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "use_dora"),
        (peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]), "modules_to_save"),
        (peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "'pissa'"),
        (peft.VeraConfig(target_modules=["q_proj"]), "VERA adapters cannot be trained on nodes"),
        (peft.PromptTuningConfig(num_virtual_tokens=2), "a client trains PROMPT_TUNING itself"),
    ],
)
def test_other_configs_are_refused(config: Any, said: str, models_dir: Path) -> None:
    [first, *_] = Chain(folder := save_tiny_model("llama", models_dir)).blocks
    with pytest.raises(ConfigError, match=said):
        AdaptedBlocks(first, open_local(folder), config, seed=SEED)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: BottleneckConfig(size=0), "must be positive, got 0"),
        (lambda: BottleneckConfig(activation="step"), "'step': use relu, gelu, silu, tanh"),
        (lambda: BottleneckConfig(norm="after"), "'after': use before or printed"),  # type: ignore[arg-type]
        (lambda: DeepPromptConfig(0), "num_virtual_tokens must be positive"),
    ],
)
def test_wrong_settings_of_own_adapters(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_adapters_get_their_initial_values_while_initializers_are_off(
    models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers switches torch's initializers off for all threads while it builds a model."""
    folder = save_tiny_model("llama", models_dir)
    chain = Chain(folder)
    alone = AdaptedBlocks(chain.blocks[0], open_local(folder), BottleneckConfig(8), seed=SEED)
    building, may_end = threading.Event(), threading.Event()

    def build() -> None:
        with initializer_lock, transformers_init.no_init_weights():
            building.set()
            may_end.wait(0.5)

    def build_beside(*args: Any, **options: Any) -> Any:
        thread.start()
        building.wait()
        return detach_span(*args, **options)

    thread = threading.Thread(target=build)
    monkeypatch.setattr(adapted_blocks, "detach_span", build_beside)
    made = AdaptedBlocks(chain.blocks[0], open_local(folder), BottleneckConfig(8), seed=SEED)
    may_end.set()
    thread.join()
    for name, value in made.parameters.items():
        assert torch.equal(value, alone.parameters[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_experts_are_not_served(family: str, models_dir: Path) -> None:
    """Of all others, what PEFT adapts."""
    checkpoint = open_local(save_tiny_model(family, models_dir))
    served = find_served_modules(checkpoint)
    if family != "mixtral":
        assert served is None
        return
    assert served == ["k_proj", "o_proj", "q_proj", "v_proj"]
    config: Any = peft.LoraConfig(r=4, target_modules=served)
    names = find_adapter_shapes(checkpoint, config, Span(0, 1))
    assert {name.split(".")[-3] for name in names} == {*served}
