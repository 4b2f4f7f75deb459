"""Table 1 of "Secure Multiparty Generative AI" by arithmetic: parameters, memory, bytes.

Models are made of their published configs on torch's meta device, without weights. The client holds
all but the blocks between the first and the last one; k servers share those in equal parts, and n
verifiers hold each part. MB are 10^6 bytes, MiB 2^20.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from nesa_node.core.ids import split_evenly

HF: Any = transformers
SPLITS = (0, 1, 2)
VERIFIERS = 3
"""The paper's n, where k is not 0."""
VALUE_BYTES = 2
"""16 bit, of weights, caches and hidden states."""
MB, MIB = 10**6, 2**20
LLAMA, SD3 = "Llama-3.1-8B", "SD3 Medium"

LLAMA_HIDDEN, LLAMA_LAYERS, LLAMA_KV_HEADS, LLAMA_HEAD_DIM = 4096, 32, 8, 128
LLAMA_CACHE_BYTES = LLAMA_LAYERS * 2 * LLAMA_KV_HEADS * LLAMA_HEAD_DIM * VALUE_BYTES
"""Of one token, in all 32 blocks: 131,072."""
PROMPT_TOKENS = 9
"""Of the paper's five prompts, which it does not print: the one fitted figure of its bytes."""
LENGTHS = (50, 100, 150)

SD3_HIDDEN = 1536
SD3_PATCH_PIXELS = 16
"""Sides of the square that one token stands for: a patch of 2 latents of 8 pixels."""
SD3_TEXT_TOKENS = 2 * 77
"""Of CLIP, and the zeros that stand for those of T5."""
SD3_GUIDED = 2
"""Each iteration computes with the prompt and without it (classifier-free guidance)."""
PICTURE_SIZES = (256, 512, 1024)


@dataclass(frozen=True, slots=True)
class PrintedSplit:
    """Of table 1, for one model and k: MB, billions of parameters; None where it has a dash."""

    client_mb: int
    client_billions: float
    server_mb: int | None = None
    server_billions: float | None = None
    wire: tuple[float, ...] = ()
    """MB (of pictures MiB) of each iteration, by length or size of the picture."""
    speeds: tuple[float, ...] = ()
    """Tokens/s by length, or seconds of an iteration by size of the picture."""


PRINTED: Mapping[str, tuple[PrintedSplit, ...]] = {
    LLAMA: (
        PrintedSplit(16474, 8.030, speeds=(38, 40, 40)),
        PrintedSplit(3262, 1.486, 13538, 6.543, (7.75, 14.31, 20.86), (4.34, 3.57, 2.70)),
        PrintedSplit(3262, 1.486, 6932, 3.272, (15.50, 28.62, 40.07), (1.15, 0.83, 0.714)),
    ),
    SD3: (
        PrintedSplit(6238, 2.930, speeds=(0.03, 0.06, 0.23)),
        PrintedSplit(2648, 1.061, 3964, 1.869, (4.82, 13.81, 49.82), (0.16, 0.26, 1.02)),
        PrintedSplit(2936, 1.061, 2116, 0.935, (9.64, 27.62, 99.64), (0.26, 0.46, 1.77)),
    ),
}


@dataclass(frozen=True, slots=True)
class SplitModel:
    """Parameters of a model: of all of it, and of each block between the first and the last."""

    parameters: int
    inner_blocks: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> SplitModel:
        """`blocks` are those of one of the `parts`."""
        inner = tuple(count_parameters(block) for block in blocks[1:-1])
        return cls(sum(count_parameters(part) for part in parts), inner)

    def client_parameters(self, splits: int) -> int:
        """With `splits` 0 the client holds everything."""
        return self.parameters - (sum(self.inner_blocks) if splits else 0)

    def server_parameters(self, splits: int) -> tuple[int, ...]:
        """Of each of the `splits` servers, in order."""
        if not splits:
            return ()
        spans = split_evenly(len(self.inner_blocks), splits)
        return tuple(sum(self.inner_blocks[span.start : span.end]) for span in spans)


def count_parameters(module: nn.Module) -> int:
    """Buffers, such as fixed position embeddings, are not counted."""
    return sum(parameter.numel() for parameter in module.parameters())


def make_llama() -> SplitModel:
    config = HF.LlamaConfig(
        hidden_size=LLAMA_HIDDEN,
        intermediate_size=14336,
        num_hidden_layers=LLAMA_LAYERS,
        num_attention_heads=32,
        num_key_value_heads=LLAMA_KV_HEADS,
        vocab_size=128_256,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = HF.LlamaForCausalLM(config)
    return SplitModel.of([model], list(model.model.layers))


def make_sd3() -> SplitModel:
    """Stable Diffusion 3 Medium as the paper has it: without the T5 text encoder."""
    import diffusers

    kinds: Any = diffusers
    with torch.device("meta"):
        transformer = kinds.SD3Transformer2DModel(
            sample_size=128,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=24,
            attention_head_dim=64,
            num_attention_heads=24,
            joint_attention_dim=4096,
            caption_projection_dim=SD3_HIDDEN,
            pooled_projection_dim=2048,
            pos_embed_max_size=192,
        )
        parts = [
            transformer,
            _make_clip(hidden=768, layers=12, heads=12),
            _make_clip(hidden=1280, layers=32, heads=20),
            kinds.AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(128, 256, 512, 512),
                layers_per_block=2,
                latent_channels=16,
                use_quant_conv=False,
                use_post_quant_conv=False,
            ),
        ]
    return SplitModel.of(parts, list(transformer.transformer_blocks))


def _make_clip(*, hidden: int, layers: int, heads: int) -> nn.Module:
    config = HF.CLIPTextConfig(
        vocab_size=49408,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        projection_dim=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    model: nn.Module = HF.CLIPTextModelWithProjection(config)
    return model


def llama_bytes(splits: int, verifiers: int = 1) -> int:
    """Of one token where the cache stays: a hidden state to each verifier and one back."""
    return splits * verifiers * 2 * LLAMA_HIDDEN * VALUE_BYTES


def shipped_cache_bytes(splits: int, tokens: int) -> int:
    """Of one token as the paper has it, at a length of `tokens`: the cache travels with each split.

    The whole model's cache of the prompt and of all tokens once, and a hidden state both ways, of
    one verifier. It reproduces the printed figures, but for one, within 0.1 %. That the cache of
    all 32 blocks travels, with those of the client, is read from the figures, not from the text.
    """
    cache = LLAMA_CACHE_BYTES * (PROMPT_TOKENS + tokens)
    return splits * cache + llama_bytes(splits)


def sd3_bytes(splits: int, pixels: int, verifiers: int = 1) -> int:
    """Of one iteration of a picture of `pixels` x `pixels`; there are no caches.

    Hidden states of picture and text both ways, and to the server an embedding of the timestep. It
    reproduces the printed figures within 0.2 % in MiB, with one verifier.
    """
    tokens = (pixels // SD3_PATCH_PIXELS) ** 2 + SD3_TEXT_TOKENS
    values = SD3_GUIDED * SD3_HIDDEN * (2 * tokens + 1)
    return splits * verifiers * values * VALUE_BYTES


def make_rows() -> Iterator[dict[str, Any]]:
    """One for each model, k, and length or size. `runs` is empty: nothing is measured."""
    for name, model in ((LLAMA, make_llama()), (SD3, make_sd3())):
        for splits in SPLITS:
            share = _share_row(name, model, splits)
            for at, size in enumerate(LENGTHS if name == LLAMA else PICTURE_SIZES):
                yield share | _wire_row(name, splits, at, size)


def _share_row(name: str, model: SplitModel, splits: int) -> dict[str, Any]:
    printed = PRINTED[name][splits]
    servers = model.server_parameters(splits)
    return {
        "part": "arithmetic",
        "model": name,
        "splits": splits,
        "client_parameters": model.client_parameters(splits),
        "server_parameters": list(servers),
        "client_bytes": VALUE_BYTES * model.client_parameters(splits),
        "server_bytes": [VALUE_BYTES * each for each in servers],
        "printed_client_parameters": printed.client_billions * 1e9,
        "printed_server_parameters": _times(printed.server_billions, 1e9),
        "printed_client_bytes": printed.client_mb * MB,
        "printed_server_bytes": _times(printed.server_mb, MB),
        "runs": [],
    }


def _wire_row(name: str, splits: int, at: int, size: int) -> dict[str, Any]:
    """`wire_unit` is that of the paper's figures: it says MB for both."""
    printed = PRINTED[name][splits]
    if name == LLAMA:
        shipped = shipped_cache_bytes(splits, size)
        ours, verified = llama_bytes(splits), llama_bytes(splits, VERIFIERS)
    else:
        ours, verified = sd3_bytes(splits, size), sd3_bytes(splits, size, VERIFIERS)
        shipped = ours
    unit = MB if name == LLAMA else MIB
    return {
        "size": size,
        "paper_wire_bytes": shipped,
        "wire_bytes": ours,
        "verified_wire_bytes": verified,
        "printed_wire_bytes": printed.wire[at] * unit if splits else None,
        "wire_unit": unit,
        "printed_speed": printed.speeds[at],
    }


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
