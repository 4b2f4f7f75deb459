"""Run as a program: make each mistake in a copy of the project and say whether tests notice.

    python -m tests.mutants [NAME ...]

Exits with 1 if one is unnoticed that should be, or its tests cannot be run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.mutants.mistakes import ROOT, Mistake, mistakes

TIMEOUT_S = 300.0


def main(names: list[str]) -> int:
    known = {mistake.name: mistake for mistake in mistakes()}
    if unknown := set(names) - known.keys():
        print(f"no such mistake: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copy = _copy_to(Path(folder))
        for mistake in known.values():
            if names and mistake.name not in names:
                continue
            verdict, failure = _verdict(copy, mistake)
            counts[verdict] += 1
            print(f"{mistake.name:5} {verdict:10} {mistake.file}: {mistake.what}", flush=True)
            if failure:
                print(f"{'':17}{failure}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return int(any(verdict in counts for verdict in ("UNNOTICED", "MOVED", "NOT RUN")))


def _copy_to(folder: Path) -> Path:
    """The files that git knows, and those it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    copy = folder / "project"
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, copy / name
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return copy


def _verdict(copy: Path, mistake: Mistake) -> tuple[str, str]:
    """Return the verdict, and pytest's line about the test that noticed."""
    path = copy / mistake.file
    try:
        right = path.read_text("utf-8")
        path.write_text(mistake.made_in(right), "utf-8")
    except (OSError, ValueError):
        return "MOVED", ""
    try:
        failure = _first_failure(copy, mistake.tests)
    except RuntimeError as error:
        return "NOT RUN", str(error)
    finally:
        path.write_text(right, "utf-8")
    if failure:
        return "noticed", failure
    return "excused" if mistake.unnoticed else "UNNOTICED", ""


def _first_failure(copy: Path, tests: str) -> str:
    """A run that hangs counts as failed. Raises `RuntimeError` if pytest could not run at all."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *shlex.split(tests)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "200",
    }
    # A file, for a process left behind would keep a pipe open.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"not ended after {TIMEOUT_S:.0f} s"
        output.seek(0)
        printed = output.read().splitlines()
    if code == 0:
        return ""
    failures = [line for line in printed if line.startswith(("FAILED ", "ERROR "))]
    if not failures:
        raise RuntimeError(f"pytest {tests} exits with {code} and names no test: no such tests?")
    # FAILED before ERROR, which may be no more than what a failed test left behind.
    return max(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
