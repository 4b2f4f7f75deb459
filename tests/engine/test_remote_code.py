"""Code that a checkpoint brings along is never run, whatever stands on standard input."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nesa_node.core.errors import NesaError
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.engine.weights.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
LOADERS = frozenset({"from_pretrained", "from_config", "pipeline"})
RUNS_NO_CODE = frozenset(
    {"AutoDistributedModelForCausalLM", "GenerationConfig", "PeftConfig", "PeftModel"}
    | {"RemoteNetwork", "diffusion_class"}
)
"""Ours (the first and `RemoteNetwork`), readers of numbers and weights, and a class of diffusers,
which reads the numbers of the config it is given."""


def loading_calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call in our code by which transformers may come upon a checkpoint's own code."""
    for folder in ("nesa_node", "examples", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
                owner = getattr(getattr(node.func, "value", None), "id", None)
                if name in LOADERS and owner not in RUNS_NO_CODE:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_loading_call_refuses_remote_code() -> None:
    calls = dict(loading_calls())
    assert len(calls) >= 8, "the search itself is broken"
    allowing = [
        where
        for where, call in calls.items()
        if not any(
            keyword.arg == "trust_remote_code"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is False
            for keyword in call.keywords
        )
    ]
    assert allowing == [], "pass trust_remote_code=False"


@pytest.mark.parametrize("model_type", ["llama", "unheard_of", None])
def test_a_folder_with_code_of_its_own_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str | None
) -> None:
    """Neither by its tokenizer nor by its config, though "yes" is waiting on standard input."""
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).write_text('ran')\n"
        "from transformers import PreTrainedConfig, PreTrainedTokenizer\n"
        "class EvilTokenizer(PreTrainedTokenizer): pass\n"
        "class EvilConfig(PreTrainedConfig): pass\n"
    )
    config = {} if model_type is None else {"model_type": model_type}
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoTokenizer": ["evil.EvilTokenizer", None]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "EvilTokenizer", "auto_map": auto_map})
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(NesaError):
        load_tokenizer(tmp_path)
    with pytest.raises(NesaError):
        open_folder(tmp_path)
    assert not marker.exists()
