"""Roots of weights: of the bytes in the files, and of what was read to load a span."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nesa_node.core.ids import Span
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.engine.weights.weights_root import hash_span, span_tensors
from nesa_node.verification.attestation.binding import weights_root
from tests.engine.tiny_models import BLOCKS

SPAN = Span(1, 3)


def stored_digests(folder: Path, names: list[str]) -> dict[str, bytes]:
    """Digests by the file's own bytes: its header is a length, JSON, then the values."""
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    found = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in names:
            start, end = (8 + size + at for at in header[name]["data_offsets"])
            described = f"{file.get_tensor(name).dtype} {tuple(header[name]['shape'])}\0"
            found[name] = hashlib.sha256(described.encode() + content[start:end]).digest()
    return found


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_root_is_of_the_files_bytes(tiny: Callable[[str], Path], family: str) -> None:
    checkpoint = open_folder(tiny(family))
    names = span_tensors(checkpoint, SPAN)
    blocks = [part for name in names for part in name.split(".") if part.isdigit()]
    assert {"1", "2"} <= set(blocks)
    expected = weights_root(stored_digests(tiny(family), names))
    assert hash_span(checkpoint, SPAN, {}) == expected
    assert hash_span(checkpoint, Span(0, BLOCKS), {}) != expected


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_loading_records_what_it_read(
    tiny: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_folder(tiny(family))
    expected = hash_span(checkpoint, SPAN, {})
    checkpoint.read_digests = {}
    load_blocks(checkpoint, SPAN, dtype=torch.bfloat16, device="cpu")
    monkeypatch.setattr(checkpoint, "read", None)  # whatever lies on the disk by now
    assert hash_span(checkpoint, SPAN, checkpoint.read_digests) == expected


def test_one_changed_value_changes_the_root(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(tiny("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    name = span_tensors(open_folder(folder), SPAN)[0]
    tensors[name].flatten()[-1] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    own, changed = (open_folder(each) for each in (tiny("llama"), folder))
    assert hash_span(own, SPAN, {}) != hash_span(changed, SPAN, {})
    untouched = Span(3, BLOCKS)
    assert hash_span(own, untouched, {}) == hash_span(changed, untouched, {})
