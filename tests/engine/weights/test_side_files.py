"""What lies beside the weights ends in an error of ours, never in one of a library's."""

from __future__ import annotations

from pathlib import Path

import pytest

from nesa_node.core.errors import CorruptCheckpointError, NesaError
from nesa_node.engine.weights.files import convert_parse_errors, read_json
from nesa_node.engine.weights.tokenizer import load_tokenizer
from tests.api.tokenizers import byte_level_tokenizer


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}}'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"tokenizer_class": 5}'),
        ("tokenizer_config.json", b'{"eos_token": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [1]}'),
        ("tokenizer_config.json", b"[" * 5000),
        ("special_tokens_map.json", b"null"),
        ("added_tokens.json", b'{"a": "b", "c": 1}'),
        ("config.json", b'{"auto_map": 5}'),
        ("config.json", b'{"model_type": "llama", "rope_scaling": 5}'),
    ],
)
def test_a_tokenizer_of_wrong_types_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(NesaError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_a_panic_of_a_library_is_refused_and_ctrl_c_is_not() -> None:
    panic = type("PanicException", (BaseException,), {})
    with (
        pytest.raises(CorruptCheckpointError, match="x cannot be read: PanicException"),
        convert_parse_errors("x"),
    ):
        raise panic("out of range")
    with pytest.raises(KeyboardInterrupt), convert_parse_errors("x"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("crowd", [b"[]," * 500_001, b"{}," * 500_001, b"1," * 1_000_001])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "tokenizer_config.json"])
def test_a_file_of_many_values_is_refused_unparsed(
    tmp_path: Path, name: str, crowd: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few MB of empty lists take a hundred MiB each, and stop all threads for seconds."""
    (tmp_path / name).write_bytes(b'{"weight_map": {}, "x": [' + crowd + b"1]}")
    monkeypatch.setattr("json.loads", None)
    with pytest.raises(CorruptCheckpointError, match="more values"):
        read_json(tmp_path / name)
