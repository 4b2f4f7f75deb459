"""The command line without a swarm: flags, errors, exit codes."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from cyclopts import App

from nesa_node.cli import app as app_module
from nesa_node.cli.app import repeat_list_flags, run_command, separate_prompt
from nesa_node.cli.flags import Flags
from nesa_node.cli.process_setup import as_memory_error
from nesa_node.core.errors import MissingBlocksError, NesaError, UnsupportedFeatureError
from nesa_node.core.settings.models import ALL_CONFIGS, SharedConfig

PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

COMMANDS = [name for name in app_module.app if not name.startswith("-")]


def nesa_node(*argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nesa_node", *argv],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        **more,
    )


@pytest.mark.parametrize("config", ALL_CONFIGS)
def test_every_setting_has_a_flag_and_every_flag_a_setting(config: type[SharedConfig]) -> None:
    flags = get_args(Flags.__class_getitem__(config.__name__))[0]
    without_flag = {"model", "models"}
    assert set(get_type_hints(flags)) - {"config"} == set(config.model_fields) - without_flag


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([command, "--help"]) == 0
    assert f"Usage: nesa-node {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_needs_no_heavy_import(command: str | None) -> None:
    """The models of settings need pydantic, the help of the application needs none of them."""
    heavy = {"torch", "transformers", "hivemind", "numpy"} | (
        {"pydantic"} if command is None else set()
    )
    argv = ["--help"] if command is None else [command, "--help"]
    code = (
        f"import sys; from nesa_node.cli.app import run_command; run_command({argv});"
        f"print('HEAVY', {heavy} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert "HEAVY set()" in done.stdout


def test_unknown_flag_is_one_line_with_the_nearest_flag_and_exit_code_2() -> None:
    done = nesa_node("run", "model", "--num-block", "3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: Unknown option: --num-block.")
    assert "--num-blocks" in done.stderr
    assert "nesa-node run --help" in done.stderr
    assert done.stderr.count("\n") == 1


def test_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["rum"]) == 2
    assert 'Did you mean "run"?' in capsys.readouterr().err


def test_typo_in_a_config_file_names_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "nesa.toml"
    path.write_text("num_block = 3\n", encoding="utf-8")
    done = nesa_node("run", "model", "--config", str(path))
    assert done.returncode == 2
    assert done.stderr == f"error: {path}: unknown key 'num_block'; did you mean 'num_blocks'?\n"


def test_typo_in_the_environment_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NESA_NUM_BLOCK", "3")
    assert run_command(["run", "model"]) == 2
    assert "NESA_NUM_BLOCK; did you mean 'NESA_NUM_BLOCKS'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "--num-blocks", "2"], "num_blocks is for a node of one model: give MODEL, too"),
        (["swarm", "create", "/tmp/model"], "'/tmp/model' cannot be asked for"),
        (["swarm", "create", "m", "--replicas", "2:1"], "--replicas 2:1: from 1 to 100"),
        (["run", "m", "--threads", "x"], "threads = 'x' (from --threads)"),
        (["run", "m", "--initial-peers", "192.0.2.7"], "addresses like /ip4/"),
        (["run", "m", "--num-blocks", "2", "--block-indices", "0:2"], "exclude each other"),
        (["run", "m", "--torch-dtype", "int8"], "--torch-dtype"),
        (["run", "m", "--quant-type", "int4"], "--quant-type"),
        (["run", "m", "--cache-dtype", "nf4"], "--cache-dtype"),
        (["run", "--shards-gib", "1", "--cache-dtype", "int8"], "the caches of shards"),
        (["run", "m", "surplus"], "surplus"),
        (["generate"], "MODEL is required"),
        (["generate", "m", "p", "--private-blocks", "1:3"], "private_blocks are those of private"),
        (["generate", "m", "p", "--client-blocks", "2"], 'two numbers of blocks like "2,2"'),
        (["generate", "m", "hello"], "--initial-peers is required"),
        (["generate", "m", " ", "--initial-peers", PEER], "prompt is empty"),
        (["generate", "m", "p", "--temperature", "-1"], "--temperature must lie in (0, 100]"),
        (["generate", "m", "p", "--seed", "-1"], "--seed must lie in"),
        (["generate", "m", "p", "--json"], "Unknown option: --json (see nesa-node generate"),
        (["generate", "m", "what", "is", "it"], "takes; put the prompt in quotes (see"),
        (["generate", "m", "--", "-5", "--seed", "1"], "flag: put --seed before it (see nesa-node"),
        (["generate", "m", "--", "-5", "--seed=1"], "error: after -- nothing is a flag: put"),
        (["chat", "m", "--", "--sytem", "1"], "--sytem. Did you mean --system? (see"),
        (["keys", "list", "x"], "error: 'x': more than nesa-node keys list takes (see"),
        (["zzz"], "status, dashboard, ... (see nesa-node --help)"),
        (["generate", "m", "p", "--top-p", "2"], "--top-p"),
        (["chat", "m", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["demo", "--nodes", "0"], "--nodes"),
        (["demo", "--nodes", "1000000000"], "at most 16"),
        (["run", "m", "--record-ttl-s", "3600"], "record_ttl_s = '3600'"),
        (["generate", "m", "x", "--seed=-1"], "--seed must lie in"),
        (["status"], "--initial-peers is required"),
    ],
)
def test_wrong_arguments_end_with_code_2_and_one_clear_line(
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run_command(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert words in said


def test_wrong_model_name_ends_with_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "./no-such-folder", "hello", "--initial-peers", PEER]
    assert run_command(argv) == 3
    said = capsys.readouterr().err
    # On a slow machine it says before what it waits for.
    assert said.splitlines()[-1].startswith("error: "), said
    assert "no-such-folder" in said
    assert "Traceback" not in said


def test_addresses_after_one_flag_are_all_taken_and_a_prompt_is_not() -> None:
    given = ["generate", "m", "--initial-peers", PEER, PEER, "hello", "/ip4", "--seed", "1"]
    assert repeat_list_flags(given) == [
        *["generate", "m", "--initial-peers", PEER, "--initial-peers", PEER],
        *["hello", "/ip4", "--seed", "1"],
    ]


def test_a_repeated_flag_stays_as_it_is() -> None:
    given = ["--host-maddrs", "/ip4/0.0.0.0/tcp/1", "--host-maddrs", "/ip6/::/tcp/1"]
    assert repeat_list_flags(given) == given


def test_addresses_may_be_host_and_port() -> None:
    given = ["run", "m", "--initial-peers", "192.0.2.7:1", "localhost:2", "[::1]:3", "--seed", "1"]
    assert repeat_list_flags(given)[2:] == [
        *["--initial-peers", "192.0.2.7:1", "--initial-peers", "localhost:2"],
        *["--initial-peers", "[::1]:3", "--seed", "1"],
    ]
    asked = ["generate", "m", "--initial-peers", "a.example:1", "at 3:45", "3:45"]
    assert repeat_list_flags(asked) == asked


@pytest.mark.parametrize("prompt", ["-5 degrees", "-5,5", "- a list", "--- title", "-è"])
def test_a_prompt_may_begin_with_a_dash(prompt: str) -> None:
    given = ["generate", "m", prompt, "--seed", "1"]
    assert separate_prompt(given) == ["generate", "m", "--seed", "1", "--", prompt]
    _, bound, _ = app_module.app.parse_args(
        separate_prompt(given), print_error=False, exit_on_error=False
    )
    assert bound.args == ("m", prompt)


@pytest.mark.parametrize(
    "argv", [["generate", "m", "-x"], ["generate", "m", "--sed=a b"], ["run", "-5 degrees"], []]
)
def test_what_looks_like_an_option_stays_one(argv: list[str]) -> None:
    assert separate_prompt(argv) == argv


def test_numbers_in_help_are_not_told_to_be_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--help-all"]) == 0
    said = capsys.readouterr().out
    assert "--threads INT" in said
    assert "--ping-every-s SECONDS" in said


def test_help_shows_basic_flags_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--help"]) == 0
    short = capsys.readouterr().out
    assert run_command(["run", "--help-all"]) == 0
    full = capsys.readouterr().out
    assert "--block-indices" in short
    assert "--ping-every-s" not in short
    assert "--ping-every-s" in full
    assert 2 * short.count("\n") < full.count("\n")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ExceptionGroup("tasks", [MemoryError()]),
    ],
)
def test_too_little_memory_ends_with_code_4(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(error, monkeypatch) == 4
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "said", "unsaid"),
    [
        ("run", "--num-blocks", "raise `ulimit -v`"),
        ("generate", "end other programs", "--num-blocks"),
        ("eval", "a smaller MODEL", "--quant-type"),
    ],
)
def test_advice_about_memory_is_for_the_command(command: str, said: str, unsaid: str) -> None:
    told = str(as_memory_error(MemoryError(), command))
    assert said in told
    assert unsaid not in told


def test_a_limit_of_address_space_is_named_where_memory_ran_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1500000 * 1024, 1500000 * 1024))
    told = str(as_memory_error(MemoryError(), "generate"))
    assert "raise `ulimit -v`, which allows 1464 MiB of address space" in told


def test_a_full_output_inside_a_task_group_is_told_the_same_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(
        "nesa_node.cli.standard_streams._write_errno",
        lambda stream: errno.ENOSPC if stream is sys.stdout else None,
    )
    monkeypatch.setattr("nesa_node.cli.standard_streams.redirect_to_null", lambda _: None)
    assert fails_with(ExceptionGroup("tasks", [error]), monkeypatch) == 4
    assert "cannot write the output" in capsys.readouterr().err


def test_another_runtime_error_is_still_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        fails_with(RuntimeError("shapes differ"), monkeypatch)


@pytest.mark.parametrize("command", [["status"], ["generate", "m", "p"]])
def test_a_limit_of_address_space_is_told_before_it_is_met(command: list[str]) -> None:
    done = subprocess.run(
        [
            "bash",
            "-c",
            'ulimit -v 700000; exec "$@"',
            "-",
            sys.executable,
            "-m",
            "nesa_node",
            *command,
            "--initial-peers",
            PEER,
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 4
    assert done.stderr.startswith("error: `ulimit -v` allows 683 MiB")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("delay_s", [0.15, 0.4, 0.8, 1.5])
def test_an_early_ctrl_c_is_no_traceback(delay_s: float) -> None:
    """From when our own first line runs; before, Python itself starts."""
    code = "import nesa_node.cli.process_setup; print('on', flush=True);"
    code += "from nesa_node.__main__ import main; main()"
    command = subprocess.Popen(
        [sys.executable, "-c", code, "generate", "./none", "hello", "--initial-peers", PEER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert command.stdout is not None
    command.stdout.readline()
    time.sleep(delay_s)
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=50)
    assert "Traceback" not in said
    assert (command.returncode, said) == (130, "interrupted\n") or command.returncode == 3


INTERRUPTED_WHERE_IT_IS_IGNORED = """
import os, signal, sys

class Ignored:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == "nesa_node.core.settings.models":
            Ignored()

sys.meta_path.insert(0, Finder)
from nesa_node.__main__ import main
main()
"""


def test_an_interrupt_that_a_library_ignores_ends_the_command() -> None:
    """As pydantic's core does while the classes of settings are made: a daemon went on."""
    argv = [sys.executable, "-c", INTERRUPTED_WHERE_IT_IS_IGNORED, "run", "./none"]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=50)
    assert (ran.returncode, ran.stderr) == (130, "interrupted\n")


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    broken = App(result_action="return_value", suppress_keyboard_interrupt=False)

    def fail() -> None:
        raise error

    broken.command(fail)
    monkeypatch.setattr(app_module, "app", broken)
    return run_command(["fail"])


def test_an_error_of_ours_gives_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(UnsupportedFeatureError("no beam search"), monkeypatch) == 9
    assert capsys.readouterr().err == "error: no beam search\n"


def test_an_error_of_ours_inside_a_task_group_is_told_the_same_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = MissingBlocksError([(10, 20)], "nobody serves 10:20")
    group = BaseExceptionGroup("tasks", [ExceptionGroup("more", [inner])])
    assert fails_with(group, monkeypatch) == 6
    assert capsys.readouterr().err == "error: nobody serves 10:20\n"


def test_a_bug_beside_an_expected_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    group = BaseExceptionGroup("tasks", [NesaError("expected"), ZeroDivisionError()])
    with pytest.raises(BaseExceptionGroup):
        fails_with(group, monkeypatch)


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails_with(KeyboardInterrupt(), monkeypatch) == 130


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m nesa_node run --help | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    assert shell(f"{sys.executable} -m nesa_node run --help {closed}") == (0, "")


@pytest.mark.parametrize("arguments", ["--version", "run --help", "keys list"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_output_is_one_line_and_exit_code_4(
    arguments: str, unbuffered: str, tmp_path: Path
) -> None:
    set_to = f"XDG_STATE_HOME={tmp_path} PYTHONUNBUFFERED={unbuffered}"
    code, said = shell(f"{set_to} {sys.executable} -m nesa_node {arguments} >/dev/full")
    assert code == 4
    assert said.startswith("error: cannot write the output: No space left on device; ")
    assert said.count("\n") == 1


def test_where_no_error_can_be_told_its_exit_code_is_kept() -> None:
    assert shell(f"{sys.executable} -m nesa_node run --no-such-flag 2>/dev/full") == (2, "")


def test_another_full_disk_is_not_taken_for_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space left"):
        fails_with(OSError(errno.ENOSPC, "No space left on device"), monkeypatch)


def test_a_missing_file_is_not_taken_for_an_output_whose_reader_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nesa_node.cli.standard_streams._write_errno", lambda _: errno.EPIPE)
    with pytest.raises(FileNotFoundError):
        fails_with(FileNotFoundError(errno.ENOENT, "No such file", "model.json"), monkeypatch)


def shell(line: str) -> tuple[int, str]:
    """Exit code and stderr."""
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stderr


def test_a_ctrl_c_while_an_error_is_reported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app_module, "_print_error", interrupt)
    monkeypatch.setattr(app_module, "limit_openmp_spinning", lambda: None)
    monkeypatch.setattr(sys, "argv", ["nesa-node", "no-such-command"])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        app_module.main()
    assert isinstance(ended.value, SystemExit)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
