"""A checkpoint's tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nesa_node.core.errors import ModelNotFoundError
from nesa_node.engine.side_files import check_side_files, parsing


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`; code that the folder brings along is never run.

    Raises `ModelNotFoundError`, and `CorruptCheckpointError` for files that cannot be parsed.
    """
    check_side_files(folder)
    with parsing(f"the tokenizer in {folder}"):
        return _load(folder)


def _load(folder: Path) -> PreTrainedTokenizerBase:
    try:
        # Without a word transformers asks on the terminal whether to run a local folder's code.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ModelNotFoundError(
                f"the tokenizer in {folder} needs Python code of its own (auto_map), which is "
                "never run; give a copy with a tokenizer.json"
            ) from error
        reason = " ".join(str(error).split())
        raise ModelNotFoundError(f"no usable tokenizer in {folder}: {reason}") from error
