"""Main program of a child process: `child_program.py PROGRAM CPU_S MEMORY_BYTES`.

PROGRAM is a file with a function `prepare` that returns the handler of questions. This file imports
nothing of the project, so that only the program's own imports delay its start.
"""

from __future__ import annotations

import json
import resource
import runpy
import signal
import sys


def main() -> None:
    """Write a line once the program is ready, then answer each line of stdin; all lines are JSON.

    SIGPROF ends the process if an answer takes more than CPU_S of CPU time. MEMORY_BYTES limits
    its address space, program included: beyond it allocations fail.
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
