"""Each model type that is served generates through three daemons what transformers does alone.

docs/models.md lists them, and why the rest is refused. B rows, L columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from tests.client.local_models import left_padded, random_ids
from tests.e2e.joining import joined
from tests.engine.model_table import describe, write_table
from tests.engine.model_types import BLOCKS, CAUSAL_TYPES, WINDOW, tiny_config
from tests.engine.tiny_models import prompt_ids, reference
from tests.faults.bed import open_bed
from tests.faults.nursery import Nursery, open_nursery
from tests.same_tokens import assert_same_as, run_reference
from tests.swarms import thirds

TOLERANCE = 1e-4
"""Of the greatest of the reference's logits; see CONTRIBUTING, "the same tokens"."""
NEW_TOKENS = 24
LEAST_DISTINCT = 4
SCALES = 8
MAX_ATTEMPTS = 4 * SCALES
"""Of weights, each scale in turn. Which vary depends on the processor's products, too."""
_AUTO: Any = AutoModelForCausalLM
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def _docs_say_served() -> list[str]:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    served = text.partition("## Served")[2].partition("## Refused")[0]
    return [line.split("`")[1] for line in served.splitlines() if line.startswith("| `")]


def _long_prompt() -> tuple[Tensor, Tensor]:
    ids_BL = torch.tensor([prompt_ids(2 * WINDOW + 9)])
    return ids_BL, torch.ones_like(ids_BL)


PROMPTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "longer than a window": _long_prompt,
    "left-padded batch": lambda: left_padded([5, 17, 11]),
}
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}


def _save_random(model_type: str, folder: Path) -> PreTrainedModel:
    """A model whose weights are scaled until its tokens vary, saved; returned as loaded again."""
    ids_BL, mask_BL = _long_prompt()
    for attempt in range(MAX_ATTEMPTS):
        scale = attempt % SCALES
        with torch.random.fork_rng():
            torch.manual_seed(attempt)
            model = _AUTO.from_config(tiny_config(model_type), dtype=torch.float32).eval()
            ends = (model.get_input_embeddings(), model.get_output_embeddings())
            kept = {id(end.weight) for end in ends}
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    noise = 0.02 if name.endswith("bias") else 0.1
                    parameter.data += noise * torch.randn_like(parameter)
                else:
                    # Of embeddings that are the head, too, the token just read comes out again.
                    parameter.data *= (0.6 if id(parameter) in kept else 1.2) ** scale
                    parameter.data *= 1.0 if id(parameter) in kept else 3.0
                    if attempt > 2 and id(parameter) not in kept:
                        # What an activation adds to all tokens drowns what tells them apart.
                        parameter.data -= parameter.data.mean(-1, keepdim=True)
                        parameter.data -= parameter.data.mean(-2, keepdim=True)
        new = model.generate(ids_BL, attention_mask=mask_BL, **OPTIONS)[0, ids_BL.shape[1] :]
        if len(set(new.tolist())) >= LEAST_DISTINCT:
            model.save_pretrained(folder)
            return reference(folder)  # type: ignore[no-any-return]
    raise AssertionError(f"{model_type} repeats itself whatever the scale of its weights")


def _assert_equal(alone: PreTrainedModel, ours: DistributedModelForCausalLM, prompt: str) -> None:
    ids_BL, mask_BL = PROMPTS[prompt]()
    new_BL = ours.generate(ids_BL, attention_mask=mask_BL, **OPTIONS)
    assert_same_as(run_reference(alone, ids_BL, mask_BL, **OPTIONS), new_BL)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with open_nursery() as opened:
        yield opened


@pytest.mark.timeout(180)
@pytest.mark.parametrize("model_type", _docs_say_served())
def test_three_daemons_give_the_tokens_of_transformers(
    model_type: str, nursery: Nursery, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    alone = _save_random(model_type, folder)
    ids_BL = random_ids(2, 90)
    forward: Any = alone.__call__
    with torch.no_grad():
        theirs = forward(ids_BL).logits
    with open_bed(nursery, folder, tmp_path) as bed:
        bed.start(thirds(BLOCKS))
        with joined(folder, bed.addresses, "chain") as ours:
            for prompt in PROMPTS:
                _assert_equal(alone, ours, prompt)
            logits = ours(ids_BL).logits
    assert (logits - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


@pytest.mark.timeout(600)
def test_the_table_of_model_types_is_current() -> None:
    text = "".join(f"{line}\n" for line in write_table())
    assert text == (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert len(_docs_say_served()) >= 60


def test_every_causal_type_is_described() -> None:
    assert set(CAUSAL_TYPES) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(CAUSAL_TYPES) == 189
    assert describe("qwen3_moe").reason is None
    assert "recurrent" in (describe("mamba").reason or "")
