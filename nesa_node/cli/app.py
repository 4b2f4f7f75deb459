"""The `nesa-node` command: dispatch to commands, and errors as one line and an exit code."""

from __future__ import annotations

import gc
import logging
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from cyclopts import App, CycloptsError, UnusedCliTokensError

from nesa_node import __version__
from nesa_node.cli.api import api
from nesa_node.cli.arguments import fill_api, spare_prompts, spread_addresses
from nesa_node.cli.bootstrap import bootstrap
from nesa_node.cli.chat import chat
from nesa_node.cli.dashboard import dashboard
from nesa_node.cli.demo import demo
from nesa_node.cli.doctor import doctor
from nesa_node.cli.eval import evaluate
from nesa_node.cli.explain import explain
from nesa_node.cli.generate import generate
from nesa_node.cli.identity import identity
from nesa_node.cli.interrupts import INTERRUPTED
from nesa_node.cli.keys import keys
from nesa_node.cli.memory_limits import as_memory_error
from nesa_node.cli.orchestrate import orchestrate
from nesa_node.cli.output import as_output_error, drop
from nesa_node.cli.run import run
from nesa_node.cli.short_help import formatter_for
from nesa_node.cli.simulate import simulate
from nesa_node.cli.status import status, with_interval
from nesa_node.cli.told_waits import told_waits
from nesa_node.core import tracing
from nesa_node.core.errors import ConfigError, NesaError
from nesa_node.core.openmp import limit_spinning
from nesa_node.core.plain_text import plain_lines

_GUESS = re.compile(
    r"(?P<before>Unknown option: --(?P<wrong>[^ =]+).*)\. Did you mean --(?P<guess>\S+)\?"
)

app = App(
    name="nesa-node",
    help="A swarm of machines that serves one language model: each holds a span of its blocks.",
    help_epilogue="`--help-all` after a command shows all of its flags. Settings of daemons, "
    "clients and gateways may also be NESA_* variables or keys of the --config file. "
    "Exit codes: docs/exit-codes.md.",
    version=__version__,
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
for _command in (
    run,
    bootstrap,
    orchestrate,
    api,
    generate,
    chat,
    status,
    dashboard,
    explain,
    simulate,
    identity,
    doctor,
    demo,
):
    app.command(_command)
app.command(evaluate, name="eval")
app.command(keys)


def main() -> NoReturn:
    """Entry point of the console script."""
    try:
        limit_spinning()
        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:  # while an error was being reported
        code = _interrupted()
    # The garbage collections at exit visit all imported objects: more than a second with torch.
    gc.freeze()
    sys.exit(code)


def run_command(argv: Sequence[str]) -> int:
    """Run one command line. Returns its exit code; expected errors become one line on stderr."""
    try:
        tokens = spare_prompts(spread_addresses(with_interval(fill_api(argv))))
        app.help_formatter, tokens = formatter_for(tokens)
        with told_waits():
            result = app(tokens, print_error=False, exit_on_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        return _report(ConfigError(_words(error, argv)))
    except NesaError as error:
        return _report(error)
    except BaseExceptionGroup as group:
        cause = _first_expected(group, _command_of(argv))
        if cause is None:
            raise
        return _report(cause)
    except BrokenPipeError:
        # The reader of stdout has exited (`nesa-node ... | head`): print no error.
        drop(sys.stdout)
        return 1
    except (MemoryError, OSError, ImportError, RuntimeError) as error:
        expected = _as_expected(error, _command_of(argv))
        if expected is None:
            raise
        return _report(expected)
    except KeyboardInterrupt:
        return _interrupted()
    finally:
        tracing.use(None)
    return result if isinstance(result, int) else 0


def _command_of(argv: Sequence[str]) -> str:
    return argv[0] if argv else ""


def _interrupted() -> int:
    _tell("interrupted")
    return INTERRUPTED


def _report(error: NesaError) -> int:
    if logging.getLogger("nesa_node").isEnabledFor(logging.DEBUG) and error.__traceback__:
        logging.getLogger("nesa_node.cli").debug("command failed", exc_info=error)
    _tell(f"error: {plain_lines(str(error))}")
    return error.exit_code


def _tell(line: str) -> None:
    """Print a line on stderr, after flushing stdout. Streams that are full or closed are skipped:
    the exit code still tells the failure."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, f"{line}\n")):
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            drop(stream)


def _words(error: CycloptsError, argv: Sequence[str]) -> str:
    """The parser's message on one line, with a hint to `--help`."""
    command = " ".join(("nesa-node", *(error.command_chain or ())))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        text = f"{' '.join(map(repr, error.unused_tokens))}: more than {command} takes"
        if command == "nesa-node generate":
            text += "; put the prompt in quotes"
    else:
        text = " ".join(str(error).split())
    text = text if text.endswith("...") else text.removesuffix(".")
    return f"{_with_near_guess(text, argv)} (see {command} --help)"


def _with_near_guess(text: str, argv: Sequence[str]) -> str:
    """Correct the parser's suggestion of a similar flag.

    It compares the leading dashes, too, so unrelated flags look similar: those are dropped. For a
    flag after `--` it suggests that same flag: that gets a message of its own.
    """
    found = _GUESS.fullmatch(text)
    if found is None:
        return text
    wrong, guess = found["wrong"], found["guess"]
    if wrong == guess and "--" in argv:
        return f"after -- nothing is a flag: put --{wrong} before it"
    return text if get_close_matches(wrong, [guess]) else found["before"]


def _first_expected(group: BaseExceptionGroup[BaseException], command: str) -> NesaError | None:
    """The first expected error in `group`; None if the group also has an unexpected one."""
    found: list[NesaError] = []

    def is_expected(error: BaseException) -> bool:
        expected = _as_expected(error, command)
        if expected is not None:
            found.append(expected)
        return expected is not None

    _, rest = group.split(is_expected)
    return found[0] if rest is None else None


def _as_expected(error: BaseException, command: str) -> NesaError | None:
    if isinstance(error, NesaError):
        return error
    return as_memory_error(error, command) or as_output_error(error)
