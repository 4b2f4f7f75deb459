"""`python -m tests.fuzz --inputs 10000000 --jobs 2`: inputs made of valid ones into parsers.

Each parser runs in a process of its own, whose memory is limited. What it may do with an input is
to accept it or to refuse it with one of our own errors, within 0.1 s and without keeping memory.
README.md here lists them; inputs that reach new Python code are changed further.
What it does otherwise is told, and its input kept in `corpus/`, with which later runs begin.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog

from tests.fuzz.loop import CORPUS, STATE_BYTES, Finding, Result, State, fuzz

_MOST_MEMORY_BYTES = 512 * 1024**2
"""Beyond what a process has once it is ready."""
_HANG_CPU_S = 20.0
_HANG_S = 600.0
"""Of an input that waits; on a machine that is busy others run in between."""
_POLL_S = 0.5
MOST_GROWTH_MIB = 32.0


def main() -> int:
    arguments = _arguments()
    if arguments.child:
        return _child(arguments)
    from tests.fuzz.targets import TARGETS

    names = arguments.target or list(TARGETS)
    print(
        f"{'parser':18}{'inputs':>10}{'accepted':>10}{'per cpu s':>11}{'slowest ms':>12}{'MiB':>7}"
    )
    groups = [names] if arguments.together else [[name] for name in names]
    total, failed = 0, False
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for results in pool.map(lambda group: _run(group, names, arguments), groups):
            for result in results:
                total += result.inputs
                failed |= _print(result)
    print(f"{total} inputs; {'see above' if failed else 'no crash, no hang, no growth'}")
    return int(failed)


def _print(result: Result) -> bool:
    """Whether something is wrong with it."""
    print(
        f"{result.name:18}{result.inputs:10}{result.accepted:10}"
        f"{result.inputs / max(result.cpu_s, 0.01):11.0f}{result.slowest_ms:12.1f}"
        f"{result.growth_mib:7.1f}",
        flush=True,
    )
    for finding in result.findings:
        print(f"  {_keep(result.name, finding)}: {finding.what}", flush=True)
    return bool(result.findings) or result.growth_mib > MOST_GROWTH_MIB


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all parsers together")
    parser.add_argument("--seconds", type=float, default=1e9, help="at most, shared alike")
    parser.add_argument("--target", action="append", help="only this parser; may be repeated")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=1, help="parsers at once")
    parser.add_argument("--together", action="store_true", help="all parsers in one process")
    parser.add_argument("--among", action="append", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(group: list[str], names: list[str], arguments: argparse.Namespace) -> list[Result]:
    """In a child; where that ends early, what it read last is a finding."""
    with (
        tempfile.NamedTemporaryFile(prefix="nesa-fuzz-") as file,
        tempfile.TemporaryFile() as output,
    ):
        file.truncate(STATE_BYTES)
        state = State(Path(file.name))
        command = [sys.executable, "-m", "tests.fuzz", "--child", file.name]
        for name in group:
            command += ["--target", name]
        for name in names:
            command += ["--among", name]
        for option in ("inputs", "seconds", "seed"):
            command += [f"--{option}", str(getattr(arguments, option))]
        child = subprocess.Popen(command, stdout=output)
        ended = _watch(child, state)
        output.seek(0)
        results = [msgspec.json.decode(line, type=Result) for line in output]
        if ended is not None or child.returncode:
            number, parser, data = state.read()
            what = ended or f"the process ended with {child.returncode}"
            results.append(Result(group[parser], number, findings=[Finding(what, data)]))
        return results


def _watch(child: subprocess.Popen[bytes], state: State) -> str | None:
    """Wait until it ends; kill it and say so if it stands still."""
    last, since, cpu_since_s = (0, 0), time.monotonic(), 0.0
    while True:
        try:
            child.wait(_POLL_S)
            return None
        except subprocess.TimeoutExpired:
            number, parser, _ = state.read()
            if (parser, number) != last or not number:
                last, since, cpu_since_s = (parser, number), time.monotonic(), _cpu_s(child.pid)
                continue
            took_s, took_cpu_s = time.monotonic() - since, _cpu_s(child.pid) - cpu_since_s
            if took_cpu_s > _HANG_CPU_S or took_s > _HANG_S:
                child.kill()
                child.wait()
                return f"stands still for {took_s:.0f} s, {took_cpu_s:.0f} s of them computing"


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _keep(name: str, finding: Finding) -> Path:
    path = CORPUS / name / hashlib.sha256(finding.data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(finding.data)
    return path


def _child(arguments: argparse.Namespace) -> int:
    from tests.fuzz.targets import TARGETS

    warnings.simplefilter("ignore")
    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    _limit_memory()
    state = State(Path(arguments.child))
    weight = sum(TARGETS[name].weight for name in arguments.among)
    for state.parser, name in enumerate(arguments.target):
        running = fuzz(
            name,
            TARGETS[name],
            inputs=max(1, round(arguments.inputs * TARGETS[name].weight / weight)),
            seconds=arguments.seconds / len(arguments.among),
            seed=arguments.seed,
            state=state,
        )
        sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(running)) + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = pages * resource.getpagesize() + _MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    sys.exit(main())
