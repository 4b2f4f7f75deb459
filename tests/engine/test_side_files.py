"""What lies beside the weights ends in an error of ours, never in one of a library's."""

from __future__ import annotations

from pathlib import Path

import pytest

from nesa_node.core.errors import CorruptCheckpointError, NesaError
from nesa_node.engine.side_files import parsing
from nesa_node.engine.tokenizer import load_tokenizer
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
        parsing("x"),
    ):
        raise panic("out of range")
    with pytest.raises(KeyboardInterrupt), parsing("x"):
        raise KeyboardInterrupt
