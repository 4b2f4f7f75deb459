"""T tokens, K experts of each, E experts, D hidden, I inputs, O outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.kernels.quantized_experts import (
    QuantizedExperts,
    find_stack,
    make_quantized_experts,
    quantize_stack,
)
from nesa_node.engine.weights.model_tree import make_empty_model
from tests.engine.chained import distance
from tests.engine.model_types import tiny_config
from tests.engine.their_layers import quantize_experts

HIDDEN, INNER, EXPERTS = 128, 192, 6
_AUTO: Any = AutoModelForCausalLM
DTYPES: list[torch.dtype] = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
LAYOUTS = ["mixtral", "gpt_oss", "aria_text", "llama4_text", "qwen3_moe"]


def make_experts(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own module with random weights, biases too."""
    config: Any = tiny_config(model_type)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER}
    counts = dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), EXPERTS)
    for name, value in (sizes | counts).items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = _AUTO.from_config(config, dtype=dtype, trust_remote_code=False)
        [experts] = [each for name, each in model.named_modules() if name.endswith(".experts")]
        for value in experts.parameters():
            value.data = (torch.randn(value.shape) * 0.1).to(dtype)
    return experts.eval().requires_grad_(False)


def quantize_module(
    experts: nn.Module, quant_type: QuantType, dtype: torch.dtype = torch.float32
) -> QuantizedExperts:
    made = make_quantized_experts(experts)
    for name in ("gate_up_proj", "down_proj"):
        shape = find_stack(experts, name)
        assert shape is not None
        matrices = iter(experts.get_parameter(name).data)
        device = torch.device("cpu")
        made.add_module(
            name, quantize_stack(matrices, shape, quant_type, dtype=dtype, device=device)
        )
    return made


def route(tokens: int, used: int = 2, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, D], experts [T, K] and their weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(tokens, HIDDEN, generator=generator)
    scores_TE = torch.rand(tokens, EXPERTS, generator=generator)
    top = scores_TE.topk(used, dim=1)
    return hidden_TD, top.indices, top.values


def call(experts: Any, tokens: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Run any family's experts, as its block calls them."""
    hidden_TD, index_TK, weights_TK = route(tokens, seed=seed)
    if "Llama4" not in type(experts).__name__ and "Scaled" not in type(experts).__name__:
        output: Tensor = experts(hidden_TD.to(dtype), index_TK, weights_TK.to(dtype))
        return output
    scores_TE = torch.zeros(tokens, EXPERTS).scatter_(1, index_TK, weights_TK)
    routed_SD = (hidden_TD * scores_TE.t().unsqueeze(-1)).flatten(0, 1).to(dtype)
    output_SD: Tensor = experts(routed_SD)
    return output_SD


@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", LAYOUTS)
def test_outputs_are_those_of_bitsandbytes_weights(
    model_type: str, dtype: torch.dtype, quant_type: QuantType, tokens: int
) -> None:
    experts = make_experts(model_type, dtype)
    plain = call(experts, tokens, dtype=dtype)
    ours = quantize_module(experts, quant_type, dtype)
    theirs = make_experts(model_type, dtype)
    assert quantize_experts(theirs, quant_type) == 2 * EXPERTS
    expected = call(theirs, tokens, dtype=dtype)
    found = call(ours, tokens, dtype=dtype)
    assert found.dtype == dtype
    tolerance = TOLERANCES[dtype]
    assert distance(found.float(), expected.float()) < tolerance
    if dtype == torch.float32:
        assert distance(plain, expected) > 100 * tolerance


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_only_the_experts_that_are_asked_for_are_read(quant_type: QuantType) -> None:
    ours = quantize_module(make_experts("mixtral"), quant_type)
    hidden_TD, index_TK, weights_TK = route(2)
    expected = ours(hidden_TD, index_TK, weights_TK)
    unused = set(range(EXPERTS)) - set(index_TK.flatten().tolist())
    assert unused

    def refuse(*_: object) -> Tensor:
        raise AssertionError("an expert was read that no token asked for")

    for name in ("gate_up_proj", "down_proj"):
        stack: Any = getattr(ours, name)
        for expert in unused:
            stack.experts[expert].forward = refuse
    assert torch.equal(ours(hidden_TD, index_TK, weights_TK), expected)


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_a_tokens_bits_do_not_depend_on_its_batch(quant_type: QuantType) -> None:
    ours = quantize_module(make_experts("qwen3_moe"), quant_type)
    hidden_TD, index_TK, weights_TK = route(8)
    together = ours(hidden_TD, index_TK, weights_TK)
    for token in range(8):
        only = slice(token, token + 1)
        alone = ours(hidden_TD[only], index_TK[only], weights_TK[only])
        assert torch.equal(alone, together[only])


def test_experts_beyond_the_last_add_nothing() -> None:
    """So transformers marks the experts of other machines, and tokens without any."""
    experts = make_experts("mixtral")
    ours = quantize_module(experts, "int8")
    hidden_TD, index_TK, weights_TK = route(5)
    index_TK[1, 0] = index_TK[3, 1] = EXPERTS
    theirs = make_experts("mixtral")
    quantize_experts(theirs, "int8")
    expected = theirs(hidden_TD, index_TK, weights_TK)
    assert distance(ours(hidden_TD, index_TK, weights_TK), expected) < 2e-6
    index_TK[:] = EXPERTS
    assert not ours(hidden_TD, index_TK, weights_TK).any()


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_gradients_of_inputs_are_those_of_the_dequantized_weights(
    model_type: str, quant_type: QuantType
) -> None:
    ours = quantize_module(make_experts(model_type), quant_type)
    theirs = make_experts(model_type)
    quantize_experts(theirs, quant_type)
    hidden_TD, index_TK, weights_TK = route(7)
    if model_type == "llama4_text":
        arguments: tuple[Tensor, ...] = (hidden_TD.repeat(EXPERTS, 1),)
    else:
        arguments = (hidden_TD, index_TK, weights_TK)
    found: list[list[Tensor]] = []
    for experts in (ours, theirs):
        given = [each.clone() for each in arguments]
        floating = [each.requires_grad_() for each in given if each.is_floating_point()]
        output: Tensor = experts(*given)
        torch.autograd.backward(output.square().sum())
        found.append([each.grad for each in floating if each.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    for mine, expected in zip(*found, strict=True):
        assert distance(mine, expected) < 1e-5


def test_no_tokens_give_no_outputs() -> None:
    ours = quantize_module(make_experts("mixtral"), "int8")
    assert ours(*(each[:0] for each in route(2))).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("quant_type", "most"), [("int8", 0.52), ("nf4", 0.30)], ids=["int8", "nf4"]
)
def test_experts_of_mixtral_8x22b_take_what_was_planned(quant_type: QuantType, most: float) -> None:
    config = MixtralConfig(
        hidden_size=6144, intermediate_size=16384, num_hidden_layers=1, num_local_experts=8
    )
    experts = make_empty_model(config).get_submodule("model.layers.0.mlp.experts")
    planned = plain = 0
    for name in ("gate_up_proj", "down_proj"):
        shape = find_stack(experts, name)
        assert shape is not None
        planned += shape.compute_bytes(quant_type)
        plain += experts.get_parameter(name).numel() * 2
    assert plain == 3 * 8 * 6144 * 16384 * 2
    assert planned / plain < most


def test_what_is_planned_is_what_a_stack_takes() -> None:
    experts = make_experts("gpt_oss")
    for quant_type in ("int8", "nf4"):
        made = quantize_module(experts, quant_type)
        for name in ("gate_up_proj", "down_proj"):
            shape = find_stack(made, name)
            assert shape is not None
            taken = sum(value.nbytes for value in getattr(made, name).parameters())
            assert taken == shape.compute_bytes(quant_type)
    numbers = sum(value.numel() for value in experts.parameters())
    assert made.count_weights() == numbers


def test_weights_beyond_16_bits_are_refused_in_int8() -> None:
    experts = make_experts("mixtral")
    experts.down_proj.data[2, 0, 0] = 1e6
    with pytest.raises(UnsupportedModelError, match="65504"):
        quantize_module(experts, "int8")


def _lose(module: Any) -> None:
    module.gate_up_proj = nn.Parameter(module.gate_up_proj[0].clone())


def _add(module: Any) -> None:
    module.extra = nn.Parameter(torch.zeros(3))


def _misfit(module: Any) -> None:
    module.down_proj = nn.Parameter(module.down_proj[:, :, :-1].clone())


@pytest.mark.parametrize("change", [_lose, _add, _misfit])
def test_an_unknown_layout_is_left_as_it_is(change: Callable[[Any], None]) -> None:
    experts = make_experts("mixtral")
    change(experts)
    assert find_stack(experts, "gate_up_proj") is None
    assert find_stack(experts, "down_proj") is None


def test_linear_layers_and_routers_are_no_stacks() -> None:
    assert find_stack(nn.Linear(4, 4), "weight") is None
    assert find_stack(nn.Embedding(4, 4), "weight") is None
