"""A checkpoint's tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nesa_node.core.errors import ModelNotFoundError


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`. Raises `ModelNotFoundError`."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelNotFoundError(f"no usable tokenizer in {folder}: {reason}") from error
