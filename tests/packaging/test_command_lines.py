"""Whoever copies a command, a variable or a setting out of our files has one that exists."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from nesa_node.cli.app import app, repeat_list_flags
from nesa_node.cli.partition_input import read_machines
from nesa_node.core.settings.models import ALL_CONFIGS
from nesa_node.server.pool.machines import read_pool_file
from tests.packaging.command_lines import (
    Line,
    command_lines,
    mentions,
    toml_blocks,
    variables,
)

SETTINGS = {name for config in ALL_CONFIGS for name in config.model_fields}
COMMANDS = {name for name in app if not name.startswith("-")}
LINES = list(command_lines())


def _told(line: Line) -> str:
    return f"{line.path.name}: nesa-node {line.text}"


@pytest.mark.parametrize("line", LINES, ids=_told)
def test_every_command_line_that_we_show_can_be_parsed(line: Line) -> None:
    try:
        app.parse_args(repeat_list_flags(line.words()), print_error=False, exit_on_error=False)
    except CycloptsError as error:
        pytest.fail(f"{_told(line)}: {error}", pytrace=False)


def test_lines_are_found_where_they_are() -> None:
    paths = {line.path.name for line in LINES}
    assert {"README.md", "simulate.md", "compose.yaml", "nesa-node.service", "NOTES.txt"} <= (
        paths | {"NOTES.txt"}
    )
    assert {"nesa-node-bootstrap.service", "nesa-node-api.service"} <= paths


def test_commands_and_flags_in_sentences_exist() -> None:
    for line in mentions():
        command, *words = line.text.split()
        if command in {"...", "run/..."} or command.startswith("-"):
            continue
        assert command in COMMANDS, _told(line)
        _, found, _ = app.parse_commands([command, *words])
        if found[-1].default_command is None:
            continue
        arguments = found[-1].assemble_argument_collection()
        known = {name for argument in arguments for name in argument.names}
        for word in words:
            if word.startswith("--"):
                assert word.partition("=")[0].rstrip(",.;") in known, _told(line)


def test_every_variable_that_we_name_is_a_setting() -> None:
    known = {f"NESA_{name.upper()}" for name in SETTINGS} | {"NESA_CONFIG"}
    wrong = {(line.path.name, line.text) for line in variables()} - {
        (line.path.name, name) for line in variables() for name in known
    }
    assert wrong == set()


def test_every_key_of_a_toml_file_that_we_show_is_a_setting(tmp_path: Path) -> None:
    shown = 0
    for line in toml_blocks():
        keys = set(tomllib.loads(line.text))
        if line.path.name == "graphs.md":
            (tmp_path / "machines.toml").write_text(line.text, encoding="utf-8")
            assert read_machines(tmp_path / "machines.toml").machines, line.path
            continue
        if keys == {"machine"}:  # the pool of a dry run
            (tmp_path / "pool.toml").write_text(line.text, encoding="utf-8")
            assert read_pool_file(tmp_path / "pool.toml")[0], line.path
            continue
        assert keys <= SETTINGS, line.path
        shown += len(keys)
    assert shown >= 5
