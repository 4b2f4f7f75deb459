"""Child processes that check requests' grammars and render discovered models' chat templates."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict

from nesa_node.api.generation.tokenization import offload_if_large
from nesa_node.api.processes import grammar_program, template_program
from nesa_node.api.processes.workers import Ask, ChildProcessPool, ChildProgram

MAX_WAITING_CHECKS = 16
"""Limit on the unfinished checks of one caller."""
MAX_REMEMBERED_CHECKS = 1024
"""Limit on cached results of checks."""
_CHECK_PROGRAM = ChildProgram(
    grammar_program.__file__,
    "read a schema",
    cpu_s=grammar_program.CPU_S,
    memory_bytes=grammar_program.MEMORY_BYTES,
    max_answer_bytes=1 << 16,
    max_waiting=MAX_WAITING_CHECKS,
)


class GrammarChecker(ChildProcessPool):
    """Checks grammars in child processes, since a check may never end, and caches the results."""

    def __init__(self) -> None:
        super().__init__(_CHECK_PROGRAM)
        self._refusals: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, grammar: str, caller: str | None = None) -> None:
        """Raise `ValueError` if `grammar` cannot be followed or exceeds the limits of a check.

        Raises `BusyError` if `caller` has too many checks waiting, or the machine is too slow.
        """
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest not in self._refusals:
            async with self.wait_turn(caller) as ask:
                if digest not in self._refusals:
                    self._refusals[digest] = await _find_refusal(grammar, ask)
                    if len(self._refusals) > MAX_REMEMBERED_CHECKS:
                        self._refusals.popitem(last=False)
        reason = self._refusals[digest]
        self._refusals.move_to_end(digest)
        if reason is not None:
            raise ValueError(reason)


async def _find_refusal(grammar: str, ask: Ask) -> str | None:
    answer = await ask(json.dumps(grammar).encode())
    if answer is None:
        return f"it takes more than {_CHECK_PROGRAM.describe_limits()} to read"
    reason: str | None = json.loads(answer)
    return reason


MAX_WAITING_RENDERINGS = 1024
"""Limit on unfinished renderings of one caller; as many requests may wait for a model."""
_MAX_JSON_BYTES_PER_CHAR = 6
"""Upper bound of a character's bytes in JSON."""
_RENDER_PROGRAM = ChildProgram(
    template_program.__file__,
    "render a chat template",
    cpu_s=template_program.CPU_S,
    memory_bytes=template_program.MEMORY_BYTES,
    max_answer_bytes=template_program.MAX_TEXT_CHARS * _MAX_JSON_BYTES_PER_CHAR + 1024,
    max_waiting=MAX_WAITING_RENDERINGS,
)


class TemplateRenderer(ChildProcessPool):
    """Renders chat templates in child processes.

    These templates are untrusted programs, and jinja2's sandbox limits neither time nor memory.
    """

    def __init__(self) -> None:
        super().__init__(_RENDER_PROGRAM)

    async def render(self, question: bytes, caller: str | None = None) -> str:
        """Rendered text. Raises `ValueError` if the template fails or exceeds the limits.

        `question` is JSON of the arguments of transformers' `render_jinja_template`. Raises
        `BusyError` if `caller` has too many renderings waiting, or the machine is too slow.
        """
        async with self.wait_turn(caller) as ask:
            answer = await ask(question)
        if answer is None:
            raise ValueError(f"it takes more than {_RENDER_PROGRAM.describe_limits()} to render")
        found: dict[str, str] = await offload_if_large(len(answer), lambda: json.loads(answer))
        if "refusal" in found:
            raise ValueError(found["refusal"])
        return found["text"]
