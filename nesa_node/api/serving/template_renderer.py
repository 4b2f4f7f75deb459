"""Chat templates of discovered models are rendered in processes of their own.

They are a stranger's programs, and jinja2's sandbox bounds neither their time nor their memory.
"""

from __future__ import annotations

import json

from nesa_node.api.bodies import template_program
from nesa_node.api.bodies.splitting import light
from nesa_node.api.processes.child_processes import ChildProcesses, Program

MAX_WAITING = 1024
"""Of one caller: as many as requests may wait for a model."""
_BYTES_PER_CHAR = 6
"""As JSON at most."""
_PROGRAM = Program(
    template_program.__file__,
    "render a chat template",
    cpu_s=template_program.CPU_S,
    memory_bytes=template_program.MEMORY_BYTES,
    answer_bytes=template_program.MAX_TEXT_CHARS * _BYTES_PER_CHAR + 1024,
    most_waiting=MAX_WAITING,
)


class TemplateRenderer:
    """Renders templates as `ChildProcesses` do. Close it."""

    def __init__(self) -> None:
        self._processes = ChildProcesses(_PROGRAM)

    async def render(self, question: bytes, caller: str = "") -> str:
        """The text. Raises `ValueError` with why there is none, and `BusyError`.

        `question` are, as JSON, the arguments of transformers' `render_jinja_template`.
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
        """End the processes. A template that is still being rendered ends its own."""
        await self._processes.close()
