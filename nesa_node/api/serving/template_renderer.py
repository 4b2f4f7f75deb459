"""Rendering of discovered models' chat templates in child processes.

These templates are untrusted programs, and jinja2's sandbox limits neither time nor memory.
"""

from __future__ import annotations

import json

from nesa_node.api.bodies import template_program
from nesa_node.api.bodies.splitting import light
from nesa_node.api.processes.child_processes import ChildProcesses, Program

MAX_WAITING = 1024
"""Limit on unfinished renderings of one caller; as many requests may wait for a model."""
_BYTES_PER_CHAR = 6
"""Upper bound of a character's bytes in JSON."""
_PROGRAM = Program(
    template_program.__file__,
    "render a chat template",
    cpu_s=template_program.CPU_S,
    memory_bytes=template_program.MEMORY_BYTES,
    answer_bytes=template_program.MAX_TEXT_CHARS * _BYTES_PER_CHAR + 1024,
    most_waiting=MAX_WAITING,
)


class TemplateRenderer:
    """Renders chat templates in `ChildProcesses`. Close it after use."""

    def __init__(self) -> None:
        self._processes = ChildProcesses(_PROGRAM)

    async def render(self, question: bytes, caller: str = "") -> str:
        """Rendered text. Raises `ValueError` if the template fails or exceeds the limits.

        `question` is JSON of the arguments of transformers' `render_jinja_template`. Raises
        `BusyError` if `caller` has too many renderings waiting, or the machine is too slow.
        """
        async with self._processes.turn(caller) as ask:
            answer = await ask(question)
        if answer is None:
            raise ValueError(f"it takes more than {_PROGRAM.limits()} to render")
        found: dict[str, str] = await light(len(answer), lambda: json.loads(answer))
        if "refusal" in found:
            raise ValueError(found["refusal"])
        return found["text"]

    async def close(self) -> None:
        """End the child processes; a busy one ends after its rendering."""
        await self._processes.close()
