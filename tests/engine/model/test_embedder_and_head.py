"""Embedding and head in 8 and 4.5 bits.

L tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM, build_model
from nesa_node.client.model.layers import LocalConnection
from nesa_node.core.errors import ConfigError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import ClientQuantType
from nesa_node.engine.kernels.quantized_linear import QuantizedLinear, quantize_matrix
from nesa_node.engine.model.embedder_and_head import QuantizedEmbedding, load_embedder_and_head
from nesa_node.engine.model.loading import load_blocks
from tests.engine.chained import open_local
from tests.engine.layouts import rewritten
from tests.engine.tiny_models import prompt_ids, reference, save_tiny_model

CPU: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
PROMPT = prompt_ids(30)
QUANT_TYPES: tuple[ClientQuantType, ...] = ("int8", "nf4")


@contextmanager
def model_of(folder: Path, quant_type: ClientQuantType) -> Iterator[Any]:
    """The whole model in this process, with its ends, and only these, quantized."""
    checkpoint = open_local(folder)
    connection = LocalConnection([load_blocks(checkpoint, Span(0, checkpoint.num_blocks), **CPU)])

    @asynccontextmanager
    async def connect(_: Any) -> Any:
        yield connection

    try:
        with build_model(checkpoint, connect, dtype="float32", quant_type=quant_type) as model:
            yield model
    finally:
        connection.close()


def with_dequantized_ends(folder: Path, quant_type: ClientQuantType) -> Any:
    """transformers' model with what the quantized matrices stand for."""
    model = reference(folder)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for end in {id(end.weight): end for end in ends}.values():
        quantized = quantize_matrix(end.weight.detach(), quant_type, **CPU)
        end.weight.data = quantized.dequantize(torch.float32)
    return model


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize(
    "family", ["llama", "llama_tied", "gemma2", "gpt2", "opt", "bloom", "granite", "cohere2"]
)
def test_logits_are_those_of_a_model_with_the_dequantized_matrices(
    models_dir: Path, family: str, quant_type: ClientQuantType
) -> None:
    folder = save_tiny_model(family, models_dir)
    expected = with_dequantized_ends(folder, quant_type)
    ids_BL = torch.tensor([PROMPT])
    with torch.inference_mode(), model_of(folder, quant_type) as model:
        logits = model(ids_BL).logits
        wanted = expected(ids_BL).logits
        assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        exact = reference(folder)(ids_BL).logits
        assert (wanted - exact).abs().max() > 1e-3 * wanted.abs().max()
        assert f"float32 held in {quant_type} on cpu" in repr(model)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_a_tied_matrix_is_held_once(models_dir: Path, quant_type: ClientQuantType) -> None:
    for family, shared in (("llama_tied", True), ("llama", False)):
        checkpoint = open_local(save_tiny_model(family, models_dir))
        embedder, head = load_embedder_and_head(checkpoint, **CPU, quant_type=quant_type)
        assert isinstance(embedder.token_embedding, QuantizedEmbedding)
        assert isinstance(head.lm_head, QuantizedLinear)
        assert (embedder.token_embedding.matrix is head.lm_head) == shared
        assert embedder.vocab_size == head.vocab_size == checkpoint.config.vocab_size
        assert embedder.dtype == torch.float32


def test_matrices_tied_by_config_but_different_on_disk_are_both_held(
    models_dir: Path, tmp_path: Path
) -> None:
    folder = rewritten(
        save_tiny_model("llama_tied", models_dir),
        tmp_path / "different",
        lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)},
    )
    embedder, head = load_embedder_and_head(open_local(folder), **CPU, quant_type="int8")
    ids_V = torch.arange(head.vocab_size)
    rows_VD = embedder(ids_V[:64], 0)
    assert torch.equal(rows_VD, head.lm_head.dequantize_rows(ids_V.flip(0)[:64]))  # type: ignore[operator]


def test_threads_embed_their_own_tokens_at_once(models_dir: Path) -> None:
    checkpoint = open_local(save_tiny_model("gemma2", models_dir))
    embedder, _ = load_embedder_and_head(checkpoint, **CPU, quant_type="int8")
    texts = [torch.tensor(prompt_ids(20, seed=seed)) for seed in range(200)]
    alone = [embedder(ids_L, 0) for ids_L in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda ids_L: embedder(ids_L, 0), texts))
    assert all(map(torch.equal, alone, together))


def test_rows_of_a_matrix_are_those_of_the_whole() -> None:
    weight_VD = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    rows_N = torch.tensor([3, 49, 3, 0])
    for quant_type in QUANT_TYPES:
        matrix = quantize_matrix(weight_VD, quant_type, **CPU)
        assert torch.equal(matrix.dequantize_rows(rows_N), matrix.dequantize(torch.float32)[rows_N])


def test_what_cannot_be_held_is_refused(models_dir: Path) -> None:
    folder = save_tiny_model("llama", models_dir)
    with pytest.raises(ConfigError, match="client-quant-type int5: give none, int8, nf4"):
        AutoDistributedModelForCausalLM.from_pretrained(folder, client_quant_type="int5")  # type: ignore[arg-type]  # what is refused
    narrow = open_local(save_tiny_model("opt_projected", models_dir))
    with pytest.raises(UnsupportedModelError, match=r"rows of 32.*--client-quant-type int8"):
        load_embedder_and_head(narrow, **CPU, quant_type="nf4")
    load_embedder_and_head(narrow, **CPU, quant_type="int8")
