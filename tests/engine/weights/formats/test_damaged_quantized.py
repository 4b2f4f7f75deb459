"""Quantized checkpoints with tensors, configs and bytes that are not what they should be."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nesa_node.core.errors import CorruptCheckpointError, ModelError
from nesa_node.core.ids import Span
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.formats.quantized_tensor import QuantizedTensor
from tests.engine.chained import open_local
from tests.engine.layouts import Tensors
from tests.engine.stored_weights import KINDS, write_quantized
from tests.engine.tiny_models import save_tiny_model
from tests.first_is_fast import first_is_fast

MUTANTS = 150
LARGEST_FACTOR = 16
"""Bytes of a float32 made of two bits."""


def _reshaped(tensor: Tensor, chance: random.Random) -> Tensor:
    sizes = [size for size in range(1, tensor.numel() + 1) if tensor.numel() % size == 0]
    first = chance.choice(sizes)
    return tensor.reshape(first, -1)


CHANGES: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    lambda tensor, chance: tensor[: len(tensor) // 2] if tensor.ndim else tensor.reshape(1),
    lambda tensor, chance: tensor[:0] if tensor.ndim else tensor,
    lambda tensor, chance: tensor.flatten(),
    lambda tensor, chance: tensor.T if tensor.ndim == 2 else tensor.unsqueeze(0),
    lambda tensor, chance: tensor.unsqueeze(-1),
    lambda tensor, chance: torch.cat([tensor, tensor]) if tensor.ndim else tensor,
    lambda tensor, chance: tensor.to(chance.choice((torch.float64, torch.int64, torch.bfloat16))),
    lambda tensor, chance: tensor.contiguous().reshape(-1).view(torch.uint8),
    _reshaped,
)


def _change_tensors(tensors: Tensors, chance: random.Random) -> None:
    name = chance.choice([each for each in tensors if ".layers." in each])
    match chance.randrange(12):
        case 0:
            del tensors[name]
        case 1:
            tensors[name.replace("_proj.", "_porj.")] = tensors[name].clone()
        case 2:
            other = chance.choice(sorted(tensors))
            tensors[name] = tensors[other].clone()
        case 3:
            numbers = tensors[name].contiguous().reshape(-1).view(torch.uint8)
            noise = [chance.randrange(256) for _ in range(64)]
            where = chance.randrange(max(len(numbers) - 64, 1))
            numbers[where : where + 64] = torch.tensor(noise[: len(numbers)], dtype=torch.uint8)
        case _:
            tensors[name] = chance.choice(CHANGES)(tensors[name], chance)


VALUES: tuple[Any, ...] = (0, -1, 1, 3, 5, 33, 2**20, 2**63, 1e308, "4", None, [], {}, True, [8, 0])


def _change_config(config: dict[str, Any], chance: random.Random) -> None:
    quantization = config["quantization_config"]
    quantization[chance.choice(sorted(quantization))] = chance.choice(VALUES)


def _change_bytes(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        path.write_bytes(content[: chance.randrange(len(content))])
        return
    size = int.from_bytes(content[:8], "little")
    for _ in range(chance.randrange(1, 4)):
        content[chance.randrange(8 + size)] = chance.choice(b'0123456789,[]{}"FU')
    path.write_bytes(content)


def _attempt(folder: Path) -> str | None:
    """Open a model and load its block; returns why it is refused."""
    size = (folder / "model.safetensors").stat().st_size
    try:
        checkpoint = open_local(folder)
        for info in checkpoint.tensors.values():
            assert info.numel * 4 <= LARGEST_FACTOR * size
        load_blocks(checkpoint, Span(0, 1), dtype=torch.float32, device="cpu", quant_type="int8")
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", first_is_fast(*KINDS))
def test_damaged_checkpoints_are_refused_or_read(
    kind: str, models_dir: Path, tmp_path: Path
) -> None:
    family, pack, quantization = KINDS[kind]
    source = save_tiny_model(family, models_dir, num_blocks=2)
    folder = write_quantized(source, tmp_path, pack, quantization).folder
    tensors = load_file(folder / "model.safetensors")
    whole = (folder / "config.json").read_text()
    assert _attempt(folder) is None
    chance, refused = random.Random(kind), 0
    for number in range(MUTANTS):
        config, changed = json.loads(whole), dict(tensors)
        if number % 3 == 0:
            _change_config(config, chance)
        else:
            _change_tensors(changed, chance)
        (folder / "config.json").write_text(json.dumps(config))
        contiguous = {name: tensor.contiguous().clone() for name, tensor in changed.items()}
        save_file(contiguous, folder / "model.safetensors")
        if number % 5 == 0:
            _change_bytes(folder / "model.safetensors", chance)
        if (told := _attempt(folder)) is not None:
            assert "\n" not in told
            assert len(told) < 1000
            refused += 1
    assert MUTANTS / 4 < refused < MUTANTS


def test_a_truncated_file_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    family, pack, config = KINDS["awq"]
    folder = write_quantized(tiny(family), tmp_path, pack, config).folder
    checkpoint = open_local(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CorruptCheckpointError, match="ended early"):
        load_blocks(checkpoint, Span(0, 6), dtype=torch.float32, device="cpu")
    with pytest.raises(CorruptCheckpointError, match="beyond the end of the file"):
        open_local(folder)


def test_a_weight_of_another_shape_than_the_models_is_refused_by_both(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    family, pack, config = KINDS["awq"]
    folder = write_quantized(tiny(family), tmp_path, pack, config).folder
    tensors = load_file(folder / "model.safetensors")
    path, other = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.k_proj"
    for part in ("qweight", "qzeros", "scales"):
        tensors[f"{path}.{part}"] = tensors[f"{other}.{part}"].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"shape \[64, 64\], its config makes it"):
        load_blocks(open_local(folder), Span(1, 2), dtype=torch.float32, device="cpu")


def test_a_model_of_another_method_than_its_tensors_is_refused(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    family, pack, _ = KINDS["awq"]
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write_quantized(tiny(family), tmp_path, pack, config).folder
    with pytest.raises(CorruptCheckpointError, match="lacks the tensors"):
        load_blocks(open_local(folder), Span(1, 2), dtype=torch.float32, device="cpu")


def test_a_weight_takes_what_it_is_said_to(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    family, pack, config = KINDS["awq"]
    checkpoint = open_local(write_quantized(tiny(family), tmp_path, pack, config).folder)
    info = checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    assert isinstance(info, QuantizedTensor)
    assert info.nbytes == 96 * 64 * 4 + 96 * 64 // 2 + 2 * 96 * 2 + 2 * 96 // 2
