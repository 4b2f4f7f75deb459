"""Every architecture gives the logits of the model that its file was made from, and of
transformers' own load of the file where that reads all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.engine.gguf.architectures import ARCHITECTURES
from nesa_node.engine.gguf.checkpoint import GgufCheckpoint, open_gguf
from nesa_node.engine.model.embedder_and_head import load_embedder_and_head
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.skeleton import Skeleton
from tests.engine.chained import distance, forward, new_row
from tests.engine.gguf_files import (
    BF16,
    F16,
    F32,
    Kind,
    add_byte_tokenizer,
    make_random_model,
    write_gguf,
)

_AUTO: Any = AutoModelForCausalLM
TOLERANCE = 1e-3
VOCABULARY = 320
BLOCKS = 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA: dict[str, Any] = _SIZES | {"intermediate_size": 96, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = _LLAMA | {
    "head_dim": 256,
    "sliding_window": 8,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_THETA: dict[str, Any] = {"rope_type": "default", "rope_theta": 500_000.0}
_NAMELESS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SERIAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "seq_length": 256,
    **_NAMELESS,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_LLAMA, head_dim=32, rope_parameters=_THETA),
    "llama_biased": lambda: LlamaConfig(**_LLAMA, attention_bias=True, mlp_bias=True),
    "llama_tied": lambda: LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    "llama3_scaled": lambda: LlamaConfig(
        **_LLAMA | {"max_position_embeddings": 131_072},
        head_dim=64,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama_linear": lambda: LlamaConfig(
        **_LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "mistral": lambda: MistralConfig(**_LLAMA, head_dim=32, sliding_window=None),
    "mixtral": lambda: MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: Qwen2Config(**_LLAMA, rope_parameters=_THETA),
    "qwen2_yarn": lambda: Qwen2Config(
        **_LLAMA,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2moe": lambda: Qwen2MoeConfig(
        **_LLAMA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
    ),
    "qwen3": lambda: Qwen3Config(**_LLAMA, head_dim=128),
    "qwen3moe": lambda: Qwen3MoeConfig(
        **_LLAMA | {"head_dim": 32},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    ),
    "phi3": lambda: Phi3Config(**_LLAMA, tie_word_embeddings=False),
    "phi3_longrope": lambda: Phi3Config(
        **_LLAMA | {"max_position_embeddings": 1024},
        original_max_position_embeddings=256,
        sliding_window=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 256,
            "short_factor": [1.0 + index / 10 for index in range(6)],
            "long_factor": [2.0 + index for index in range(6)],
        },
    ),
    "gemma2": lambda: Gemma2Config(**_GEMMA),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA),
    "gemma3_scaled": lambda: Gemma3TextConfig(
        **_GEMMA | {"num_hidden_layers": 7},
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "starcoder2": lambda: Starcoder2Config(**_LLAMA),
    "starcoder2_far": lambda: Starcoder2Config(**_LLAMA, rope_parameters=_THETA),
    "stablelm": lambda: StableLmConfig(**_LLAMA, use_qkv_bias=True),
    "stablelm_parallel": lambda: StableLmConfig(
        **_LLAMA,
        use_parallel_residual=True,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.5},
    ),
    "nemotron": lambda: NemotronConfig(**_LLAMA),
    "gpt-oss": lambda: GptOssConfig(
        **_LLAMA,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
    "gpt2": lambda: GPT2Config(
        **_NAMELESS, vocab_size=VOCABULARY, n_embd=64, n_layer=BLOCKS, n_head=4, n_positions=256
    ),
    "bloom": lambda: BloomConfig(**_SERIAL, n_layer=BLOCKS, n_head=4),
    "falcon": lambda: FalconConfig(**_SIZES, multi_query=True),
    "falcon_groups": lambda: FalconConfig(
        **_SIZES, ffn_hidden_size=128, new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon_groups_one_norm": lambda: FalconConfig(
        **_SIZES,
        ffn_hidden_size=128,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
    ),
}
THEIRS = (
    "llama", "llama_tied", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "starcoder2",
    "stablelm", "nemotron", "bloom", "falcon",
)  # fmt: skip
"""Files of which transformers' loader reads all that matters at these sizes. It takes its defaults
for biases of Llama, sizes of experts, rotary scaling, GPT-2's positions and Falcon's groups."""


def ids() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCABULARY, (1, 40), generator=generator)


@torch.inference_mode()
def logits_of(model: Any) -> Tensor:
    result: Tensor = model(ids()).logits[0]
    return result


def whole_model(checkpoint: GgufCheckpoint) -> Any:
    """transformers' model with all of a checkpoint's tensors, in float32."""
    skeleton = Skeleton(checkpoint)
    skeleton.make_buffers(skeleton.model, torch.device("cpu"))
    skeleton.load(
        skeleton.tensor_names, dtype=torch.float32, device=torch.device("cpu"), task="loading"
    )
    skeleton.require_complete(skeleton.model)
    return skeleton.model


def theirs(path: Path) -> Any:
    return _AUTO.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    ).eval()


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[PreTrainedModel, Path]]:
    def make(name: str, **options: Any) -> tuple[PreTrainedModel, Path]:
        model = make_random_model(CONFIGS[name]())
        return model, write_gguf(model, tmp_path / f"{name}.gguf", **options)

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_gives_the_logits_of_the_model_that_it_was_made_from(
    made: Callable[..., tuple[PreTrainedModel, Path]], tmp_path: Path, name: str
) -> None:
    model, path = made(name)
    checkpoint = open_gguf(path, tmp_path / "cache")
    assert checkpoint.config.model_type == model.config.model_type or name == "mistral"
    assert checkpoint.resolve_dtype("auto") == torch.float32
    assert distance(logits_of(whole_model(checkpoint)), logits_of(model)) < 1e-5


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", THEIRS)
def test_a_quantized_file_gives_the_logits_of_transformers(
    made: Callable[..., tuple[PreTrainedModel, Path]], tmp_path: Path, name: str, kind: Kind
) -> None:
    _, path = made(name, kind=kind, tokenizer=add_byte_tokenizer)  # they count its tokens
    checkpoint = open_gguf(path, tmp_path / "cache")
    assert checkpoint.resolve_dtype("auto") == torch.bfloat16
    expected = logits_of(theirs(path))
    assert distance(logits_of(whole_model(checkpoint)), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "qwen3moe", "gpt-oss", "falcon_groups"])
def test_a_quantized_file_that_transformers_reads_in_part_is_near_its_model(
    made: Callable[..., tuple[PreTrainedModel, Path]], tmp_path: Path, name: str
) -> None:
    model, path = made(name, kind=Kind.Q8_0)
    found = logits_of(whole_model(open_gguf(path, tmp_path / "cache")))
    # Experts are chosen by values: rounding can change a choice.
    assert 1e-5 < distance(found, logits_of(model)) < 0.3


def test_every_architecture_is_compared() -> None:
    made_of = {name.partition("_")[0] for name in CONFIGS}
    assert set(ARCHITECTURES) <= made_of


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bloom", "gpt-oss", "qwen3moe"])
def test_blocks_of_a_file_run_one_after_the_other(
    made: Callable[..., tuple[PreTrainedModel, Path]], tmp_path: Path, name: str
) -> None:
    model, path = made(name)
    checkpoint = open_gguf(path, tmp_path / "cache")
    embedder, head = load_embedder_and_head(checkpoint, dtype=torch.float32, device="cpu")
    hidden_LD = embedder(ids()[0], 0)
    for span in (Span(0, 1), Span(1, BLOCKS)):
        blocks = load_blocks(checkpoint, span, dtype=torch.float32, device="cpu")
        hidden_LD = forward(blocks, hidden_LD, new_row(blocks))
    assert distance(head(hidden_LD), logits_of(model)) < 1e-5


_WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "kind",
    [kind for kind in gguf.quants._type_traits if kind not in (Kind.BF16, Kind.Q8_0, Kind.Q4_0)],
    ids=lambda kind: kind.name,
)
def test_every_quantization_gives_the_logits_of_transformers(tmp_path: Path, kind: Kind) -> None:
    config = LlamaConfig(**_LLAMA | _WIDE | {"num_hidden_layers": 1})
    path = write_gguf(
        make_random_model(config),
        tmp_path / "model.gguf",
        kind=kind,
        tokenizer=add_byte_tokenizer,
    )
    checkpoint = open_gguf(path, tmp_path / "cache")
    expected = logits_of(theirs(path))
    assert expected.isfinite().all()
    # Random blocks have a mean, by which most logits are alike at all positions.
    mean = expected.mean(0)
    found = logits_of(whole_model(checkpoint))
    assert distance(found - mean, expected - mean) < TOLERANCE


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_blocks_are_quantized_anew_after_they_were_read(
    made: Callable[..., tuple[PreTrainedModel, Path]], tmp_path: Path, quant_type: Any
) -> None:
    model, path = made("llama", kind=Kind.Q8_0)
    checkpoint = open_gguf(path, tmp_path / "cache")
    embedder, head = load_embedder_and_head(checkpoint, dtype=torch.float32, device="cpu")
    blocks = load_blocks(
        checkpoint, Span(0, BLOCKS), dtype=torch.float32, device="cpu", quant_type=quant_type
    )
    hidden_LD = forward(blocks, embedder(ids()[0], 0), new_row(blocks))
    limit = {"int8": 0.1, "nf4": 0.6}[quant_type]
    assert 1e-4 < distance(head(hidden_LD), logits_of(model)) < limit


@pytest.mark.parametrize(
    ("kind", "dtype"), [(F32, torch.float32), (F16, torch.float16), (BF16, torch.bfloat16)]
)
def test_plain_numbers_keep_their_dtype(
    made: Callable[..., tuple[PreTrainedModel, Path]], tmp_path: Path, kind: Kind, dtype: Any
) -> None:
    model, path = made("llama", kind=kind)
    checkpoint = open_gguf(path, tmp_path / "cache")
    assert checkpoint.resolve_dtype("auto") == dtype
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(checkpoint.read(name), model.state_dict()[name].to(dtype))


def test_half_precision_of_gemma_is_bfloat16(
    made: Callable[..., tuple[PreTrainedModel, Path]], tmp_path: Path
) -> None:
    _, path = made("gemma2", kind=F16)
    assert open_gguf(path, tmp_path / "cache").resolve_dtype("auto") == torch.bfloat16


def test_a_tensor_without_a_place_is_refused(
    made: Callable[..., tuple[PreTrainedModel, Path]], tmp_path: Path
) -> None:
    """Norms of queries, say, without which the model would be another one."""
    _, path = made("llama", tensors={"blk.0.attn_q_norm.weight": np.ones(32, np.float32)})
    with pytest.raises(
        UnsupportedModelError, match=r"holds blk\.0\.attn_q_norm\.weight, for which"
    ):
        open_gguf(path, tmp_path / "cache")


def test_a_tensor_of_another_shape_is_refused(
    made: Callable[..., tuple[PreTrainedModel, Path]], tmp_path: Path
) -> None:
    _, path = made("llama", tensors={"blk.1.ffn_up.weight": np.ones((97, 64), np.float32)})
    with pytest.raises(
        CorruptCheckpointError, match=r"blk\.1\.ffn_up\.weight \[97, 64\] cannot be"
    ):
        open_gguf(path, tmp_path / "cache")


def test_a_missing_tensor_is_named(
    made: Callable[..., tuple[PreTrainedModel, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.engine import gguf_files

    convert = gguf_files.convert
    monkeypatch.setattr(
        gguf_files,
        "convert",
        lambda model: {k: v for k, v in convert(model).items() if k != "blk.2.attn_v.weight"},
    )
    _, path = made("llama")
    checkpoint = open_gguf(path, tmp_path / "cache")
    with pytest.raises(
        CorruptCheckpointError, match=r"lacks the tensors model\.layers\.2\.self_attn"
    ):
        load_blocks(checkpoint, Span(2, 3), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"attention.causal": False}, "attention.causal = False, which cannot be served"),
        ({"attention.clamp_kqv": 8.0}, "attention.clamp_kqv = 8.0"),
        ({"attention.max_alibi_bias": 8.0}, "attention.max_alibi_bias = 8.0"),
        ({"rope.scaling.type": "longrope"}, "scales its rotary frequencies by 'longrope'"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale = 2.5"),
    ],
)
def test_a_setting_that_changes_the_model_is_refused(
    made: Callable[..., tuple[PreTrainedModel, Path]],
    tmp_path: Path,
    metadata: dict[str, Any],
    said: str,
) -> None:
    _, path = made("llama", metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=said):
        open_gguf(path, tmp_path / "cache")


def test_other_rotary_divisors_than_llama_3s_are_refused(
    made: Callable[..., tuple[PreTrainedModel, Path]], tmp_path: Path
) -> None:
    divisors = np.linspace(1, 3, 16, dtype=np.float32)
    _, path = made("llama", tensors={"rope_freqs.weight": divisors})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight that is no scaling of Ll"):
        open_gguf(path, tmp_path / "cache")


@pytest.mark.parametrize("architecture", ["mamba", "deci", "lfm2", "clip", "rwkv7"])
def test_other_architectures_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=f"GGUF file of '{architecture}', which"):
        open_gguf(path, tmp_path / "cache")
