"""Shallow prompts before a model cut into spans, against PEFT in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from nesa_node.core.errors import ConfigError, ContextLengthError
from nesa_node.engine.model.embedder_and_head import load_embedder_and_head
from nesa_node.engine.training.adapted_blocks import AdaptedBlocks
from nesa_node.engine.training.adapters import OptimizerConfig
from nesa_node.engine.training.prompted_input import PARAMETER, PromptedInput, is_prompt_tuning
from nesa_node.engine.training.span_trainer import SpanTrainer, finish
from nesa_node.engine.training.text_layout import TextLayout
from tests.cli.tiny import write_tiny_model
from tests.engine.chained import Chain, distance, open_local
from tests.engine.tiny_models import FAMILIES, POSITIONS, VOCABULARY, reference, save_tiny_model
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS, SEED, remove_dropout

pytestmark = PEFT_WARNINGS
PROMPT = 5
PACKED = ("llama", "gemma2", "gpt2")


def config_of(**more: Any) -> Any:
    return peft.PromptTuningConfig(
        **{"task_type": "CAUSAL_LM", "num_virtual_tokens": PROMPT, **more}
    )


def make_input(folder: Path, config: Any, **more: Any) -> PromptedInput:
    checkpoint = open_local(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"} | more
    embedder, _ = load_embedder_and_head(checkpoint, **options)
    return PromptedInput(config, embedder, checkpoint, seed=SEED)


def make_reference(folder: Path, config: Any) -> Any:
    model = reference(folder).float()
    torch.manual_seed(SEED)
    adapted: Any = peft.get_peft_model(model, copy.deepcopy(config))
    return adapted.train()


def prompt_of(adapted: Any) -> Any:
    return adapted.prompt_encoder["default"].embedding.weight


def make_texts(lengths: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (length,), generator=generator) for length in lengths]


def compute_reference(adapted: Any, texts: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Gradient of the prompt and sum of the texts' losses, one text at a time."""
    total = 0.0
    for ids_L in texts:
        loss = adapted(input_ids=ids_L[None], labels=ids_L[None], use_cache=False).loss * len(ids_L)
        loss.backward()
        total += float(loss.detach())
    return prompt_of(adapted).grad, total


def run_chain(
    chain: Chain, folder: Path, made: PromptedInput, texts: Sequence[Tensor], layout: TextLayout
) -> tuple[Tensor, float]:
    """Gradient of the prompt and sum of the losses through a trainer for each span."""
    checkpoint = open_local(folder)
    spans = [SpanTrainer(made, OptimizerConfig())]
    for blocks in chain.blocks:
        adapted = AdaptedBlocks(blocks, checkpoint, None, seed=SEED)
        spans.append(SpanTrainer(adapted, OptimizerConfig()))
    ids_T = torch.cat([torch.nn.functional.pad(ids_L, (PROMPT, 0)) for ids_L in texts])
    ids_RL, batch = layout.to_rows(ids_T), layout.make_batch(0)
    positions_RL = batch.positions_RL
    if positions_RL is None:
        positions_RL = torch.arange(ids_RL.shape[1]).expand_as(ids_RL)
    hidden_RLD = made.embed_batch(ids_RL, positions_RL)
    for span in spans:
        hidden_RLD = finish(span.forward(0, 0, hidden_RLD, batch))
    output_TD = layout.from_rows(hidden_RLD).requires_grad_()
    logits_TV = chain.head.logits_with_gradients(output_TD)
    loss = torch.zeros(())
    parts = torch.split(logits_TV, [PROMPT + len(each) for each in texts])
    for ids_L, part_LV in zip(texts, parts, strict=True):
        predicted_LV = part_LV[PROMPT - 1 : -1]
        loss = loss + torch.nn.functional.cross_entropy(predicted_LV, ids_L, reduction="sum")
    [grad_TD] = torch.autograd.grad(loss, output_TD)
    grad_RLD = layout.to_rows(grad_TD)
    for span in reversed(spans):
        grad_RLD = finish(span.backward(0, 0, grad_RLD))
    grad_PD = made.parameters[PARAMETER].grad
    assert grad_PD is not None
    return grad_PD, float(loss.detach())


@pytest.mark.parametrize(
    ("family", "packed"),
    [*((family, False) for family in FAMILIES), *((family, True) for family in PACKED)],
)
def test_gradients_are_those_of_peft(
    family: str, packed: bool, models_dir: Path, tmp_path: Path
) -> None:
    folder = remove_dropout(save_tiny_model(family, models_dir), tmp_path)
    config, lengths = config_of(), (9, 21, 14)
    expected, loss = compute_reference(make_reference(folder, config), make_texts(lengths))
    rows = [PROMPT + length for length in lengths]
    layout = TextLayout((tuple(rows),) if packed else tuple((length,) for length in rows))
    made = make_input(folder, config)
    found, found_loss = run_chain(Chain(folder), folder, made, make_texts(lengths), layout)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("init", ["RANDOM", "SAMPLE_VOCAB"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_initial_values_are_those_of_peft(family: str, init: str, models_dir: Path) -> None:
    folder, config = save_tiny_model(family, models_dir), config_of(prompt_tuning_init=init)
    state = torch.get_rng_state()
    found = make_input(folder, config).parameters[PARAMETER]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found, prompt_of(make_reference(folder, config)))
    low = make_input(folder, config, dtype=torch.bfloat16).parameters[PARAMETER]
    assert low.dtype == torch.float32
    assert distance(low.detach(), found.detach()) < 1e-2


@pytest.mark.parametrize("text", ["hello", "hello again the capital w1 w2 w3 w4"])
def test_a_prompt_begins_as_a_text(text: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = config_of(
        prompt_tuning_init="TEXT", prompt_tuning_init_text=text, tokenizer_name_or_path=str(folder)
    )
    made = make_input(folder, config)
    adapted = make_reference(folder, config)
    assert torch.equal(made.parameters[PARAMETER], prompt_of(adapted))
    assert text in made.label
    theirs = adapted.peft_config["default"]
    for name in ("token_dim", "num_layers", "num_attention_heads", "num_transformer_submodules"):
        assert getattr(made.config, name) == getattr(theirs, name), name


def test_a_gradient_has_the_same_bits_each_time(models_dir: Path) -> None:
    """Also where threads could add in any order."""
    made = make_input(save_tiny_model("llama", models_dir), config_of())
    layout = TextLayout(((PROMPT + 3,) * 400,))
    batch = layout.make_batch(0)
    hidden_RLD = torch.randn(1, layout.num_tokens, 64)
    grad_RLD = torch.randn(1, layout.num_tokens, 64)
    found = [
        torch.autograd.grad(
            made.run_block(0, hidden_RLD, batch), made.parameters[PARAMETER], grad_RLD
        )[0]
        for _ in range(3)
    ]
    assert all(torch.equal(each, found[0]) for each in found)
    rows_NLD = grad_RLD.view(400, -1, 64)[:, :PROMPT]
    in_order = torch.zeros(PROMPT, 64)
    for each in rows_NLD:
        in_order += each
    assert torch.equal(found[0], in_order)


def test_virtual_tokens_take_positions_of_the_context(models_dir: Path) -> None:
    made = make_input(save_tiny_model("gpt2", models_dir), config_of())
    ids_RL = torch.zeros(1, POSITIONS + 1, dtype=torch.int64)
    with pytest.raises(ContextLengthError, match=str(POSITIONS + 1)):
        made.embed_batch(ids_RL, torch.arange(POSITIONS + 1)[None])
    with pytest.raises(ValueError, match="token ids"):
        made.embed_batch(ids_RL[:, :3] + VOCABULARY, torch.arange(3)[None])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_virtual_tokens": 0}, "num_virtual_tokens must be a positive number, got 0"),
        ({"num_virtual_tokens": None}, "got None"),
        ({"task_type": None}, "task_type=None"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type='SEQ_2_SEQ_LM'"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules=2: the model needs 1"),
        ({"token_dim": 32}, "token_dim=32: the model needs 64"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"prompt_tuning_init": "TEXT"}, "PEFT cannot make a prompt by TEXT: .*nowhere"),
    ],
)
def test_other_prompts_are_refused(changes: dict[str, Any], said: str, models_dir: Path) -> None:
    texts = {"prompt_tuning_init_text": "hello", "tokenizer_name_or_path": "./nowhere"}
    config = config_of(**(texts if "prompt_tuning_init" in changes else {}), **changes)
    with pytest.raises(ConfigError, match=said):
        make_input(save_tiny_model("llama", models_dir), config)


def test_a_model_with_smaller_embeddings_is_refused(models_dir: Path) -> None:
    with pytest.raises(ConfigError, match="token embeddings have"):
        make_input(save_tiny_model("opt_projected", models_dir), config_of())


def test_only_prompt_tuning_is_the_clients() -> None:
    assert is_prompt_tuning(config_of())
    for other in (
        peft.LoraConfig(),
        peft.PrefixTuningConfig(num_virtual_tokens=3),
        peft.PromptEncoderConfig(num_virtual_tokens=3),
        peft.MultitaskPromptTuningConfig(num_virtual_tokens=3),
        None,
    ):
        assert not is_prompt_tuning(other)
