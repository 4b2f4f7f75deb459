"""Program of a child process that renders untrusted chat templates.

It renders as a tokenizer's `apply_chat_template` does, with transformers' function, but does not
import torch, so that it starts in half a second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jinja2 import TemplateError

CPU_S = 1.0
"""CPU time limit of one rendering; 4096 messages take 0.1 s with a usual template."""
MEMORY_BYTES = 1 << 29
"""Limit on the process's address space; an idle process has 150 MB."""
MAX_TEXT_CHARS = 1 << 22
"""Limit on a text to tokenize, which takes up to 200 bytes of memory per character."""
_MAX_REASON_CHARS = 500

REFUSAL_ERRORS = (
    TemplateError,
    # Errors of templates that do not expect this conversation.
    *(TypeError, ValueError, LookupError, AttributeError, RecursionError),
    *(ArithmeticError, MemoryError),
)


def describe_refusal(error: BaseException) -> str:
    """Reason why a template refuses a conversation, from an error of `REFUSAL_ERRORS`."""
    if isinstance(error, ArithmeticError | MemoryError):
        return f"it asks for too much ({type(error).__name__})"
    # A template may raise lone surrogates, which UTF-8 cannot encode.
    return str(error)[:_MAX_REASON_CHARS].encode("utf-8", "replace").decode()


def prepare() -> Callable[[dict[str, Any]], dict[str, str]]:
    """Handler of questions for `child_program.py`: renders to `text`, or to `refusal`."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return partial(_render, render_jinja_template)


def _render(render: Callable[..., Any], question: dict[str, Any]) -> dict[str, str]:
    """Call `render` with the keyword arguments in `question`, for one conversation."""
    try:
        [text], _ = render(**question)
        text.encode()
    except REFUSAL_ERRORS as error:
        return {"refusal": describe_refusal(error)}
    if len(text) > MAX_TEXT_CHARS:
        return {"refusal": f"it makes more than {MAX_TEXT_CHARS} characters of them"}
    return {"text": text}
