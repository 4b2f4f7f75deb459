"""What a chat template makes of a conversation, found out by a process of its own.

transformers compiles and renders the template, as a tokenizer's `apply_chat_template` does; the
process does without torch, so that it starts in half a second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jinja2 import TemplateError

CPU_S = 1.0
"""Of one rendering. 4096 messages honestly need 0.1 s."""
MEMORY_BYTES = 1 << 29
"""Address space of the process; with nothing to do it has 150 MB."""
MAX_TEXT_CHARS = 1 << 22
"""Of a text that is split into tokens, which takes up to 200 bytes for each character."""
_SHOWN_CHARS = 500

REFUSALS = (
    TemplateError,
    # What a template trips over that was written for other conversations.
    *(TypeError, ValueError, LookupError, AttributeError, RecursionError),
    *(ArithmeticError, MemoryError),
)


def reason_of(error: BaseException) -> str:
    """Why a template refuses a conversation, from one of `REFUSALS` that it raised."""
    if isinstance(error, ArithmeticError | MemoryError):
        return f"it asks for too much ({type(error).__name__})"
    # A template may write half a character, which could not be sent.
    return str(error)[:_SHOWN_CHARS].encode("utf-8", "replace").decode()


def prepare() -> Callable[[dict[str, Any]], dict[str, str]]:
    """What a process answers (`child_program.py`): a text, or why there is none."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return partial(_answer, render_jinja_template)


def _answer(render: Callable[..., Any], question: dict[str, Any]) -> dict[str, str]:
    """`question` is what `render` is given by name, with one conversation."""
    try:
        [text], _ = render(**question)
        text.encode()
    except REFUSALS as error:
        return {"refusal": reason_of(error)}
    if len(text) > MAX_TEXT_CHARS:
        return {"refusal": f"it makes more than {MAX_TEXT_CHARS} characters of them"}
    return {"text": text}
