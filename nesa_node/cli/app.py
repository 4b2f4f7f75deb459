"""The `nesa-node` command: dispatch to commands, and errors as one line and an exit code.

Arguments that the parser does not accept as they are written are rewritten first.
"""

from __future__ import annotations

import gc
import logging
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

from cyclopts import App, CycloptsError, UnusedCliTokensError
from cyclopts.help import DefaultFormatter

from nesa_node import __version__
from nesa_node.cli.commands.adapters import adapters
from nesa_node.cli.commands.daemons import api, bootstrap, dashboard, identity, orchestrate, run
from nesa_node.cli.commands.demo import demo
from nesa_node.cli.commands.deploy import deploy
from nesa_node.cli.commands.eval import evaluate
from nesa_node.cli.commands.finetune import finetune
from nesa_node.cli.commands.generate import chat, generate
from nesa_node.cli.commands.keys import keys
from nesa_node.cli.commands.leakage import leakage
from nesa_node.cli.commands.networks import plan, task
from nesa_node.cli.commands.simulate import simulate
from nesa_node.cli.commands.status import doctor, explain, status
from nesa_node.cli.commands.swarm import swarm
from nesa_node.cli.commands.verify import verify
from nesa_node.cli.flags import FLAG_GROUPS, advanced_flags
from nesa_node.cli.process_setup import (
    INTERRUPTED_EXIT_CODE,
    as_memory_error,
    limit_openmp_spinning,
)
from nesa_node.cli.standard_streams import as_output_error, redirect_to_null
from nesa_node.core import tracing
from nesa_node.core.errors import ConfigError, NesaError
from nesa_node.core.logging import escape_lines
from nesa_node.core.wait_tracking import WaitTracker

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions


DEFAULT_API_ADDRESS = "127.0.0.1:8000"
DEFAULT_WATCH_INTERVAL_S = "2"
_API_ADDRESS_PATTERN = re.compile(r"(\[[0-9a-fA-F:]+\]|localhost|[0-9.]+):[0-9]+")


def rewrite_argv(argv: Sequence[str]) -> Sequence[str]:
    """Apply all rewriting of this module."""
    return separate_prompt(repeat_list_flags(fill_optional_values(argv)))


def fill_optional_values(tokens: Sequence[str]) -> Sequence[str]:
    """Insert the default address after an `--api` without one, and the interval after `--watch`."""
    filled: list[str] = []
    for token, following in zip(tokens, (*tokens[1:], ""), strict=False):
        filled.append(token)
        if token == "--api" and not _API_ADDRESS_PATTERN.fullmatch(following):
            filled.append(DEFAULT_API_ADDRESS)
        elif token == "--watch" and not _is_number(following):
            filled.append(DEFAULT_WATCH_INTERVAL_S)
    return filled


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_LIST_FLAGS = frozenset({"--initial-peers", "--host-maddrs", "--announce-maddrs"})
_PEER_ADDRESS_PATTERN = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/.*|(\[[0-9a-fA-F:.]+\]|localhost|[\w-]+(\.[\w-]+)+):\d{1,5}"
)


def repeat_list_flags(tokens: Iterable[str]) -> Sequence[str]:
    """Rewrite `--initial-peers A B` as `--initial-peers A --initial-peers B`.

    Only tokens that look like addresses belong to the list, so that a prompt may follow it.
    """
    spread: list[str] = []
    current: str | None = None
    count = 0
    for token in tokens:
        if current is not None and _PEER_ADDRESS_PATTERN.fullmatch(token):
            if count:
                spread.append(current)
            count += 1
        else:
            current, count = (token, 0) if token in _LIST_FLAGS else (None, 0)
        spread.append(token)
    return spread


_NUMBER_FLAGS = frozenset(
    {"--temperature", "--top-p", "--seed", "--max-new-tokens", "--threads", "--step-timeout-s"}
)
_NUMBER_PATTERN = re.compile(r"-[0-9.]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_OPTION_PATTERN = re.compile(r"--?[A-Za-z][A-Za-z0-9-]*(=.*)?", re.DOTALL)


def separate_prompt(tokens: Sequence[str]) -> Sequence[str]:
    """Move prompts of `generate` that begin with a dash, such as `-5 degrees`, behind a `--`."""
    if not tokens or tokens[0] != "generate" or "--" in tokens:
        return tokens
    options: list[str] = []
    prompts: list[str] = []
    for before, token in zip(("", *tokens), tokens, strict=False):
        is_option = not token.startswith("-") or _OPTION_PATTERN.fullmatch(token)
        is_value = before in _NUMBER_FLAGS and _NUMBER_PATTERN.fullmatch(token)
        (options if is_option or is_value else prompts).append(token)
    return [*options, "--", *prompts] if prompts else tokens


WAIT_POLL_INTERVAL_S = 0.25
REPEAT_WAIT_AFTER_S = 10.0
"""Seconds until the same wait is reported again."""


@contextmanager
def report_waits() -> Iterator[None]:
    """Print the waits of the commands run in the context on stderr, as `[waiting for ...]`."""
    waits, over = WaitTracker(), threading.Event()
    telling = threading.Thread(
        target=_report_slow_waits, args=(waits, over), name="waits", daemon=True
    )
    telling.start()
    try:
        with waits.activate():
            yield
    finally:
        over.set()
        telling.join()


def _report_slow_waits(waits: WaitTracker, over: threading.Event) -> None:
    last: tuple[object, ...] = ()
    again_at = 0.0
    while not over.wait(WAIT_POLL_INTERVAL_S):
        wait = waits.slow_wait()
        if wait is not None and (wait.key != last or time.monotonic() >= again_at):
            last, again_at = wait.key, time.monotonic() + REPEAT_WAIT_AFTER_S
            # A streamed answer on the same terminal may be in the middle of a line.
            start = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""
            with suppress(OSError, ValueError):
                print(f"{start}[{wait.text(waits.clock())}]", file=sys.stderr, flush=True)


HELP_ALL_FLAG = "--help-all"


class ShortHelpFormatter(DefaultFormatter):
    """Help formatter that omits advanced flags, and panels that have only those."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        shown = panel.entries
        if str(panel.title) in FLAG_GROUPS:
            shown = [e for e in panel.entries if not advanced_flags().intersection(e.names)]
        if shown:
            super().__call__(console, options, panel.copy(entries=shown))


def choose_help_formatter(tokens: Sequence[str]) -> tuple[DefaultFormatter, Sequence[str]]:
    """Choose the formatter, and replace `--help-all` in `tokens` by `--help`."""
    flags = tokens[: tokens.index("--")] if "--" in tokens else tokens
    if HELP_ALL_FLAG not in flags:
        return ShortHelpFormatter(), tokens
    return DefaultFormatter(), ["--help" if token == HELP_ALL_FLAG else token for token in tokens]


_SUGGESTION_PATTERN = re.compile(
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
    *(run, bootstrap, orchestrate, api, generate, chat, status, dashboard, deploy),
    *(explain, simulate, plan, task, identity, doctor, demo, evaluate, leakage, finetune, verify),
):
    # By its path: then the parser evaluates the flags of the command that is used, not of all.
    _path = f"{_command.__module__}:{_command.__name__}"
    _name = "eval" if _command is evaluate else _command.__name__
    app.command(_path, name=_name, help=_command.__doc__)
app.command(keys)
app.command(swarm)
app.command(adapters)


def main() -> NoReturn:
    """Entry point of the console script."""
    try:
        limit_openmp_spinning()
        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:  # while an error was being reported
        code = _print_interrupted()
    # The garbage collections at exit visit all imported objects: more than a second with torch.
    gc.freeze()
    sys.exit(code)


def run_command(argv: Sequence[str]) -> int:
    """Run one command line. Returns its exit code; expected errors become one line on stderr."""
    command = argv[0] if argv else ""
    try:
        app.help_formatter, tokens = choose_help_formatter(rewrite_argv(argv))
        with report_waits():
            result = app(tokens, print_error=False, exit_on_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        return _print_error(ConfigError(_parser_message(error, argv)))
    except NesaError as error:
        return _print_error(error)
    except BaseExceptionGroup as group:
        cause = _first_expected_error(group, command)
        if cause is None:
            raise
        return _print_error(cause)
    except BrokenPipeError:
        # The reader of stdout has exited (`nesa-node ... | head`): print no error.
        redirect_to_null(sys.stdout)
        return 1
    except (MemoryError, OSError, ImportError, RuntimeError) as error:
        expected = _convert_error(error, command)
        if expected is None:
            raise
        return _print_error(expected)
    except KeyboardInterrupt:
        return _print_interrupted()
    finally:
        tracing.set_tracer(None)
    return result if isinstance(result, int) else 0


def _print_interrupted() -> int:
    _print_line("interrupted")
    return INTERRUPTED_EXIT_CODE


def _print_error(error: NesaError) -> int:
    if logging.getLogger("nesa_node").isEnabledFor(logging.DEBUG) and error.__traceback__:
        logging.getLogger("nesa_node.cli").debug("command failed", exc_info=error)
    _print_line(f"error: {escape_lines(str(error))}")
    return error.exit_code


def _print_line(line: str) -> None:
    """Print a line on stderr, after flushing stdout. Streams that are full or closed are skipped:
    the exit code still tells the failure."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, f"{line}\n")):
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            redirect_to_null(stream)


def _parser_message(error: CycloptsError, argv: Sequence[str]) -> str:
    """The parser's message on one line, with a hint to `--help`."""
    command = " ".join(("nesa-node", *(error.command_chain or ())))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        text = f"{' '.join(map(repr, error.unused_tokens))}: more than {command} takes"
        if command == "nesa-node generate":
            text += "; put the prompt in quotes"
    else:
        text = " ".join(str(error).split())
    text = text if text.endswith("...") else text.removesuffix(".")
    return f"{_check_suggestion(text, argv)} (see {command} --help)"


def _check_suggestion(text: str, argv: Sequence[str]) -> str:
    """Correct the parser's suggestion of a similar flag.

    It compares the leading dashes, too, so unrelated flags look similar: those are dropped. For a
    flag after `--` it suggests that same flag: that gets a message of its own.
    """
    found = _SUGGESTION_PATTERN.fullmatch(text)
    if found is None:
        return text
    wrong, guess = found["wrong"], found["guess"]
    if wrong == guess and "--" in argv:
        return f"after -- nothing is a flag: put --{wrong} before it"
    return text if get_close_matches(wrong, [guess]) else found["before"]


def _first_expected_error(
    group: BaseExceptionGroup[BaseException], command: str
) -> NesaError | None:
    """The first expected error in `group`; None if the group also has an unexpected one."""
    found: list[NesaError] = []

    def is_expected(error: BaseException) -> bool:
        expected = _convert_error(error, command)
        if expected is not None:
            found.append(expected)
        return expected is not None

    _, rest = group.split(is_expected)
    return found[0] if rest is None else None


def _convert_error(error: BaseException, command: str) -> NesaError | None:
    if isinstance(error, NesaError):
        return error
    return as_memory_error(error, command) or as_output_error(error)
