"""Loading of a checkpoint's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nesa_node.core.errors import ModelNotFoundError
from nesa_node.engine.weights.families import FAMILIES
from nesa_node.engine.weights.side_files import check_side_files, convert_parse_errors, read_json
from nesa_node.engine.weights.tokenizer_rules import sanitize_tokenizer, sanitize_tokenizer_config

_TEMPLATE_FILE = "chat_template.jinja"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`; code in the folder is never run.

    Raises `ModelNotFoundError`, and `CorruptCheckpointError` for files that cannot be parsed.
    """
    check_side_files(folder)
    with convert_parse_errors(f"the tokenizer in {folder}"):
        return _load(folder)


def load_discovered_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an untrusted model, which the swarm announced.

    Only its `tokenizer.json` is used, if `tokenizer_rules.py` accepts it, read by the class that
    `load_tokenizer` would choose. Raises as `load_tokenizer`, and `UnsupportedModelError`.
    """
    check_side_files(folder)
    what = f"the tokenizer in {folder}"
    try:
        content = sanitize_tokenizer((folder / "tokenizer.json").read_bytes())
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"{what} has no tokenizer.json, which a discovered model needs; name it with --model"
        ) from error
    config = sanitize_tokenizer_config(
        _read_object(folder / "tokenizer_config.json"),
        special_tokens=_read_object(folder / "special_tokens_map.json"),
    )
    said = _read_object(folder / "config.json")
    model_type = said.get("model_type") if isinstance(said, dict) else None
    # In `folder` transformers would find other files and build other tokenizers from them.
    with convert_parse_errors(what), TemporaryDirectory(prefix="nesa-tokenizer-") as checked:
        (Path(checked) / "tokenizer.json").write_bytes(content)
        (Path(checked) / "tokenizer_config.json").write_text(json.dumps(config))
        if isinstance(model_type, str) and model_type in FAMILIES:
            (Path(checked) / "config.json").write_text(json.dumps({"model_type": model_type}))
        if (template := folder / _TEMPLATE_FILE).is_file():
            (Path(checked) / _TEMPLATE_FILE).write_bytes(template.read_bytes())
        return _load(Path(checked))


def _read_object(path: Path) -> object:
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


def _load(folder: Path) -> PreTrainedTokenizerBase:
    try:
        # Unless `trust_remote_code` is given, transformers prompts on the terminal for a folder
        # with code.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ModelNotFoundError(
                f"the tokenizer in {folder} needs Python code of its own (auto_map), which is "
                "never run; give a copy with a tokenizer.json"
            ) from error
        reason = " ".join(str(error).split())
        raise ModelNotFoundError(f"no usable tokenizer in {folder}: {reason}") from error
