"""What a `quantization_config` may say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.engine.weights.formats.compressed import CompressedFormat, PackedScheme
from nesa_node.engine.weights.formats.packed_columns import AwqFormat, GptqFormat
from nesa_node.engine.weights.formats.quantization_config import find_format
from nesa_node.engine.weights.formats.small_floats import Fp8Format, Mxfp4Format
from nesa_node.engine.weights.formats.stored_format import StoredFormat
from tests.engine.chained import open_local
from tests.engine.layouts import rewritten, set_config


def of(config: object) -> StoredFormat | None:
    return find_format({"quantization_config": config}, name="m")


def compressed(**weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        (None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, Fp8Format(((128, 64),))),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, Fp8Format(())),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Fp8Format(())),
        ({"quant_method": "gptq", "bits": 4, "damp_percent": 0.1}, GptqFormat(4, 128, 1, False)),
        (
            {
                "quant_method": "gptq",
                "bits": 3,
                "group_size": -1,
                "checkpoint_format": "gptq_v2",
                "dynamic": {"+:.*": {"bits": 8}},
            },
            GptqFormat(3, -1, 0, True),
        ),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, AwqFormat(64)),
        ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, AwqFormat(128)),
        ({"quant_method": "mxfp4"}, Mxfp4Format()),
        (compressed(group_size=32), CompressedFormat((PackedScheme(4, 32),), ((1, 32),))),
        (
            compressed(num_bits=8, type="float", block_structure=[128, 128]),
            CompressedFormat((), ((128, 128),)),
        ),
        (compressed(group_size=-1), CompressedFormat((PackedScheme(4, None),))),
    ],
)
def test_settings_are_read(config: object, expected: StoredFormat | None) -> None:
    assert of(config) == expected


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("gptq", "quantized in a way that cannot be served"),
        ([1], "cannot be served"),
        ({"bits": 4}, "cannot be served"),
        ({"quant_method": ["gptq"]}, "cannot be served"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "('bitsandbytes')"),
        ({"quant_method": "quip" * 100}, "or one of fp8, "),
        ({"quant_method": "gptq", "bits": 4, "group_s\ud800ize": 4}, "surrogates not allowed"),
        ({"quant_method": "\ud800\n"}, r"'\ud800\n'"),
        ({"quant_method": "gptq"}, "required field `bits`"),
        ({"quant_method": "gptq", "bits": 5}, "Invalid enum value 5"),
        ({"quant_method": "gptq", "bits": "4"}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "groups have no size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -7}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 2**80}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "Marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 8}, "8"),
        ({"quant_method": "awq", "zero_point": False}, "no zero points"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [1e9, 1e9]}, "weight_block_size"),
        (compressed(num_bits=3), "3"),
        (compressed(group_size=0), "groups have no size"),
        (compressed(block_structure="2x4"), "block_structure"),
        (compressed() | {"format": "marlin-24"}, "marlin-24"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (compressed() | {"transform_config": {"config_groups": {"R1": {}}}}, "config_groups"),
        (
            compressed() | {"config_groups": {str(each): {} for each in range(65)}},
            "config_groups",
        ),
    ],
)
def test_other_settings_are_refused_in_one_line(config: object, told: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        of(config)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_no_quantizer_of_transformers_is_chosen(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = set_config(rewritten(tiny("llama"), tmp_path / "m"), quantization_config=config)
    checkpoint = open_local(folder)
    assert checkpoint.stored_format == Fp8Format(((128, 128),))
    assert not hasattr(checkpoint.config, "quantization_config")
