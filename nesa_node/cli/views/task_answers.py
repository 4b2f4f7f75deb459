"""Answers of pipelines as text, JSON and pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TextIO

import torch

from nesa_node.core.errors import OutputError
from nesa_node.core.logging import escape_text

MAX_SHOWN_NUMBERS = 6
MAX_NAME = 60


def save_pictures(answer: Any, given: str) -> Any:
    """`answer` with its pictures (masks, depths) written beside the input, by their paths.

    They are called as the input's file, with a number. Raises `OutputError`.
    """
    stem, count = Path(given).with_suffix(""), 0

    def replace(each: Any) -> Any:
        nonlocal count
        if hasattr(each, "save") and hasattr(each, "size"):  # a picture, of Pillow
            count += 1
            path = f"{stem}.{count}.png"
            try:
                each.save(path)
            except OSError as error:
                raise OutputError(f"{path} cannot be written: {error}") from error
            return path
        if isinstance(each, dict):
            return {key: replace(value) for key, value in each.items()}
        if isinstance(each, list | tuple):
            return [replace(value) for value in each]
        return each

    return replace(answer)


def save_painted(output: Any, prompt: str) -> Any:
    """Pictures that were made of a text, written to the current folder and named after it.

    No file is overwritten.
    """
    words = re.sub("[^a-z0-9]+", "-", prompt.lower()).strip("-")[:MAX_NAME] or "picture"
    stem, count = words, 1
    while Path(f"{stem}.1.png").exists():
        count += 1
        stem = f"{words}-{count}"
    return save_pictures([{"picture": each} for each in output.images], stem)


def plain(answer: Any) -> Any:
    """`answer` as JSON has it."""
    if isinstance(answer, dict):
        return {str(key): plain(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [plain(value) for value in answer]
    if isinstance(answer, torch.Tensor) or hasattr(answer, "tolist"):
        return answer.tolist()
    return answer


def print_answer(given: str, answer: Any, file: TextIO) -> None:
    """One line for each item of an answer."""
    print(f"{escape_text(given)}:", file=file)
    items = answer if isinstance(answer, list) else [answer]
    if items and not isinstance(items[0], dict):
        print(f"  {_show(plain(items))}", file=file)
        return
    for item in items:
        words = [f"{key}: {_show(plain(value))}" for key, value in item.items()]
        print(f"  {', '.join(words)}", file=file)


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{key} {_show(each)}" for key, each in value.items())
    if isinstance(value, list):
        more = f" ... ({len(value)} in all)" if len(value) > MAX_SHOWN_NUMBERS else ""
        return f"[{', '.join(map(_show, value[:MAX_SHOWN_NUMBERS]))}{more}]"
    return escape_text(str(value))
