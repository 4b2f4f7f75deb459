"""Runs a program's answers within limits: `child_program.py PROGRAM CPU_S MEMORY_BYTES`.

PROGRAM is a file with a function `prepare`, which returns what answers a question. This file needs
nothing of the project, so that a process starts as quickly as its program is loaded.
"""

from __future__ import annotations

import json
import resource
import runpy
import signal
import sys


def main() -> None:
    """Write a line once the program is ready; then answer each line of stdin, both as JSON.

    An answer that takes more than CPU_S ends the process (SIGPROF). MEMORY_BYTES are its address
    space, the program included: beyond them allocating fails.
    """
    program, cpu_s, memory_bytes = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = runpy.run_path(program)["prepare"]()
    _write(None)
    for line in sys.stdin.buffer:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answered = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answered)


def _write(answer: object) -> None:
    line = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
