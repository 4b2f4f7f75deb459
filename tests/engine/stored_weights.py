"""Small models whose linear layers are stored in few bits, packed here bit by bit.

O outputs, I inputs, G groups of inputs, W words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests.engine.layouts import Tensors, rewritten, set_config

Array = npt.NDArray[Any]
Packed = tuple[Tensors, Tensor]
"""Stored tensors, by what follows the layer's path, and the float32 weight that they stand for."""
Pack = Callable[[Array], Packed]
LINEAR = re.compile(r"(.*\.layers\.\d+\..*(?:proj|w[123]))\.weight")
EXPERTS = re.compile(r"(.*\.experts\.(?:gate_up|down)_proj)")
"""Names of gpt-oss' stacked experts [E, I, O]."""


def pack_words(numbers: Array, bits: int) -> Tensor:
    """Unsigned numbers [R, N] as words [R, N * bits / 32]: number n begins at bit n * bits."""
    single = (numbers[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    packed = np.packbits(single.reshape(len(numbers), -1), axis=-1, bitorder="little")
    return torch.from_numpy(packed.view("<i4").copy())


def _round_to_groups(
    weight_OI: Array, group_I: Array, bits: int, *, symmetric: bool = False
) -> tuple[Array, Array, Array]:
    """Numbers [O, I] of `bits` bits, and float16 scales and zero points [O, G] (1 at least)."""
    groups = int(group_I.max()) + 1
    most = 2**bits - 1
    scale_OG = np.empty((len(weight_OI), groups), np.float16)
    zero_OG = np.empty((len(weight_OI), groups), np.int64)
    number_OI = np.empty(weight_OI.shape, np.int64)
    for group in range(groups):
        part = weight_OI[:, group_I == group]
        low, high = part.min(1), part.max(1)
        if symmetric:
            high = np.abs(part).max(1)
            low = -high
        scale = ((high - low) / most).astype(np.float16)
        zero = np.full(len(scale), (most + 1) // 2) if symmetric else np.rint(-low / scale)
        zero = zero.clip(1, most).astype(np.int64)
        scale_OG[:, group], zero_OG[:, group] = scale, zero
        numbers = np.rint(part / scale[:, None].astype(np.float64)) + zero[:, None]
        number_OI[:, group_I == group] = numbers.clip(0, most)
    return number_OI, scale_OG, zero_OG


def _stand_for(number_OI: Array, scale_OG: Array, zero_OG: Array, group_I: Array) -> Tensor:
    whole = number_OI - zero_OG[:, group_I]
    return torch.from_numpy((whole * scale_OG[:, group_I].astype(np.float64)).astype(np.float32))


def gptq(bits: int, *, group: int = 32, ordered: bool = False, second: bool = False) -> Pack:
    """AutoGPTQ's tensors; `ordered`: groups are of columns in another order, as act-order makes."""

    def pack(weight_OI: Array) -> Packed:
        inputs = weight_OI.shape[1]
        size = inputs if group == -1 else group
        group_I = np.arange(inputs) // size
        if ordered:
            group_I = np.random.default_rng(inputs).permutation(group_I)
        number_OI, scale_OG, zero_OG = _round_to_groups(weight_OI, group_I, bits)
        stored = {
            "qweight": pack_words(number_OI, bits).T.contiguous(),
            "qzeros": pack_words(zero_OG.T - (0 if second else 1), bits),
            "scales": torch.from_numpy(scale_OG.T.copy()),
            "g_idx": torch.from_numpy(group_I.astype(np.int32)),
        }
        return stored, _stand_for(number_OI, scale_OG, zero_OG, group_I)

    return pack


def gptq_config(
    bits: int, *, group: int = 32, ordered: bool = False, second: bool = False
) -> dict[str, Any]:
    kind = {"checkpoint_format": "gptq_v2"} if second else {}
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": ordered,
        "sym": False,
        **kind,
    }


AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of eight successive outputs, that in each place of a word."""


def _pack_awq(numbers: Array) -> Tensor:
    """Numbers [R, 8 W] as words [R, W]."""
    words = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for place, output in enumerate(AWQ_OUTPUTS):
            words[:, column] |= numbers[:, 8 * column + output].astype(np.uint32) << (4 * place)
    return torch.from_numpy(words.view(np.int32))


def awq(group: int = 32) -> Pack:
    def pack(weight_OI: Array) -> Packed:
        group_I = np.arange(weight_OI.shape[1]) // group
        number_OI, scale_OG, zero_OG = _round_to_groups(weight_OI, group_I, 4)
        stored = {
            "qweight": _pack_awq(number_OI.T),
            "qzeros": _pack_awq(zero_OG.T),
            "scales": torch.from_numpy(scale_OG.T.copy()),
        }
        return stored, _stand_for(number_OI, scale_OG, zero_OG, group_I)

    return pack


def awq_config(group: int = 32) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }


def fp8(block: tuple[int, int] | None, *, name: str = "weight_scale_inv") -> Pack:
    """8-bit floats with a float32 scale for each block; None: one for the matrix."""

    def pack(weight_OI: Array) -> Packed:
        outputs, inputs = weight_OI.shape
        rows, columns = block or (outputs, inputs)
        scale_RG = torch.empty(-(-outputs // rows), -(-inputs // columns))
        values = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
        whole = torch.empty(outputs, inputs)
        for row in range(scale_RG.shape[0]):
            for column in range(scale_RG.shape[1]):
                place = np.s_[
                    row * rows : (row + 1) * rows, column * columns : (column + 1) * columns
                ]
                part = torch.from_numpy(weight_OI[place].astype(np.float32))
                scale_RG[row, column] = part.abs().max() / 448
                values[place] = (part / scale_RG[row, column]).to(torch.float8_e4m3fn)
                whole[place] = values[place].float() * scale_RG[row, column]
        scale = scale_RG if block is not None else scale_RG.reshape(())
        return {"weight": values, name: scale}, whole

    return pack


def fp8_config(block: tuple[int, int] | None) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": None if block is None else list(block),
    }


def _find_ranges(weight_OI: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """The least and the largest value of what has a scale of its own, in the scales' shape."""
    if args.strategy == "tensor":
        return weight_OI.min().reshape(1), weight_OI.max().reshape(1)
    if args.strategy == "channel":
        return weight_OI.amin(1, keepdim=True), weight_OI.amax(1, keepdim=True)
    rows, columns = args.block_structure or (1, args.group_size)
    # Blocks at the edges may be smaller; their own values fill them.
    outputs, inputs = weight_OI.shape
    missing = (-inputs % columns, -outputs % rows)
    padded = torch.nn.functional.pad(weight_OI[None], (0, missing[0], 0, missing[1]), "replicate")
    tall, wide = padded.shape[1:]
    blocks = padded.view(tall // rows, rows, wide // columns, columns)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def compressed(kind: str, **weights: Any) -> Pack:
    """Tensors of the library compressed-tensors, in its format `kind`, and what it makes of them.

    `weights` are its settings.
    """

    def pack(weight_OI: Array) -> Packed:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        weight = torch.from_numpy(weight_OI).float()
        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        state: Tensors = {"weight": weight}
        overall = None
        if args.strategy == "tensor_group":
            overall = generate_gparam(weight.min(), weight.max())
            state["weight_global_scale"] = overall
        low, high = _find_ranges(weight, args)
        state["weight_scale"], zero = calculate_qparams(low, high, args, global_scale=overall)
        state["weight_zero_point"] = zero.to(torch.int8) if args.type == "int" else zero
        compressor = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress(state, scheme)
        whole = compressor.decompress(stored, scheme)["weight"]
        return stored, whole.float()

    return pack


def compressed_config(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _compressed_kind(kind: str, **weights: Any) -> tuple[str, Pack, dict[str, Any]]:
    return "llama", compressed(kind, **weights), compressed_config(kind, **weights)


FLOAT4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(weight_EIO: Array) -> Packed:
    """gpt-oss' tensors: 4-bit floats, two in a byte, and an exponent for each 32 inputs."""
    group_EOGC = weight_EIO.transpose(0, 2, 1).reshape(len(weight_EIO), weight_EIO.shape[2], -1, 32)
    largest = np.abs(group_EOGC).max(-1, keepdims=True).clip(2.0**-100)
    exponent = np.floor(np.log2(largest)).astype(np.int64) - 2
    unit = group_EOGC / 2.0**exponent
    nearest = np.abs(np.abs(unit)[..., None] - FLOAT4).argmin(-1)
    code = nearest + 8 * (unit < 0)
    stored = {
        "blocks": torch.from_numpy((code[..., ::2] + 16 * code[..., 1::2]).astype(np.uint8)),
        "scales": torch.from_numpy((exponent[..., 0] + 127).astype(np.uint8)),
    }
    whole = FLOAT4[nearest] * np.where(unit < 0, -1, 1) * 2.0**exponent
    whole_EIO = whole.reshape(*whole.shape[:2], -1).transpose(0, 2, 1)
    return stored, torch.from_numpy(whole_EIO.astype(np.float32).copy())


@dataclass(frozen=True)
class StoredModel:
    """A model with quantized weights, and the same with the weights that they stand for."""

    folder: Path
    plain: Path


def write_quantized(
    source: Path, target: Path, pack: Pack, config: dict[str, Any], **settings: object
) -> StoredModel:
    """Write a saved model twice, below `target`. `settings` are put into both configs."""
    pattern, separator = (EXPERTS, "_") if pack is mxfp4 else (LINEAR, ".")
    whole: Tensors = {}

    def quantize(tensors: Tensors) -> Tensors:
        made: Tensors = {}
        for name, tensor in tensors.items():
            if (found := pattern.fullmatch(name)) is None:
                made[name] = tensor
                continue
            stored, whole[name] = pack(tensor.double().numpy())
            made |= {f"{found[1]}{separator}{part}": value for part, value in stored.items()}
        return made

    name = source.name
    folder = set_config(
        rewritten(source, target / "quantized" / name, quantize),
        quantization_config=config,
        **settings,
    )
    plain = rewritten(source, target / "plain" / name, lambda tensors: tensors | whole)
    assert whole
    return StoredModel(folder, set_config(plain, **settings))


Kind = tuple[str, Pack, dict[str, Any]]
BLOCK = (32, 32)
KINDS: dict[str, Kind] = {
    "gptq in 4 bits": ("llama", gptq(4), gptq_config(4)),
    "gptq in 3 bits by act-order": ("llama", gptq(3, ordered=True), gptq_config(3, ordered=True)),
    "gptq in 2 bits": ("qwen2", gptq(2, group=16), gptq_config(2, group=16)),
    "gptq v2 in 8 bits": ("llama", gptq(8, second=True), gptq_config(8, second=True)),
    "gptq without groups": ("llama_biased", gptq(4, group=-1), gptq_config(4, group=-1)),
    "gptq of experts": ("mixtral", gptq(4), gptq_config(4)),
    "awq": ("llama", awq(), awq_config()),
    "fp8 in blocks": ("llama", fp8(BLOCK), fp8_config(BLOCK)),
    "fp8 by matrix": ("mistral", fp8(None), fp8_config(None)),
    "fp8 of fused layers": ("phi3", fp8(BLOCK), fp8_config(BLOCK)),
    "compressed int4 in groups": _compressed_kind(
        "pack-quantized", num_bits=4, strategy="group", group_size=32
    ),
    "compressed int4 with zero points": _compressed_kind(
        "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "compressed int8 by rows": _compressed_kind("int-quantized", strategy="channel"),
    "compressed fp8 in blocks": _compressed_kind(
        "float-quantized", type="float", strategy="block", block_structure=[32, 32]
    ),
    "mxfp4": ("gpt_oss", mxfp4, {"quant_method": "mxfp4"}),
}
"""Family, and how its weights are stored."""
