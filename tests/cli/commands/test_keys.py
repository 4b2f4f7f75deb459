"""`nesa-node keys`: what is printed, what is kept, and what a running gateway makes of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nesa_node.cli.app import run_command
from nesa_node.core.settings.declaration import default_keys_path
from nesa_node.web.key_store import KeyStore
from tests.web.tiny_gateway import bearer, browser, gate


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "keys.json"
    monkeypatch.setenv("NESA_KEYS_PATH", str(path))
    return path


def say(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run_command(["keys", *argv]) == 0
    return capsys.readouterr().out


def test_a_key_is_printed_alone_so_that_a_shell_can_take_it(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["keys", "add", "alice"]) == 0
    said = capsys.readouterr()
    key = said.out.strip()
    assert said.out == f"{key}\n"
    assert "shown only now" in said.err
    assert str(path) in said.err
    assert key not in said.err
    found = KeyStore(path).find(key)
    assert found is not None
    assert found.name == "alice"


def test_limits_and_an_end_can_be_given_and_are_listed(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--requests-per-min", "60", "--tokens-per-min", "9000", "--concurrent", "4")
    say(capsys, "add", "alice", *flags, "--expires-days", "1.5")
    (made,) = KeyStore(path).read_all()
    assert made.requests_per_minute == 60
    assert made.tokens_per_minute == 9000
    assert made.concurrent_requests == 4
    assert made.expires_at is not None
    assert abs(made.expires_at - time.time() - 1.5 * 86_400) < 60
    listed = say(capsys, "list")
    assert "60 requests/min, 9000 tokens/min, 4 at once" in listed
    assert made.id in listed
    (shown,) = json.loads(say(capsys, "list", "--json"))
    assert shown["name"] == "alice"
    assert shown["used_at"] is None
    assert shown["expired"] is False
    assert "sha256" not in shown


def test_names_of_strangers_are_shown_as_text(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(capsys, "add", "[red]alice[/red] [/nonsense]")
    assert "[red]alice[/red] [/nonsense]" in say(capsys, "list")
    assert path.exists()


@pytest.mark.parametrize("by", ["id", "name", "key"])
def test_a_key_is_revoked_and_the_last_one_leaves_a_closed_door(
    path: Path, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    key = say(capsys, "add", "alice").strip()
    (made,) = KeyStore(path).read_all()
    told = say(capsys, "revoke", {"id": made.id, "name": "alice", "key": key}[by])
    assert f"revoked {made.id} (alice)" in told
    assert str(path) in told
    assert KeyStore(path).find(key) is None
    assert "the gateway refuses all requests" in say(capsys, "list")


def test_without_a_file_the_list_is_empty(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nesa-node keys add NAME" in say(capsys, "list")
    assert json.loads(say(capsys, "list", "--json")) == []
    assert not path.exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["add"], "NAME"),
        (["add", ""], "printable"),
        (["add", "  "], "printable"),
        (["add", "a\nb"], "printable"),
        (["add", "a" * 65], "printable"),
        (["add", "a", "--requests-per-min", "0"], "--requests-per-min"),
        (["add", "a", "--tokens-per-min", "-1"], "--tokens-per-min"),
        (["add", "a", "--concurrent", "0"], "--concurrent"),
        (["add", "a", "--expires-days", "0"], "--expires-days"),
        (["add", "a", "--expires-days", "nan"], "--expires-days"),
        (["add", "a", "--keys-path", "/dev/null"], "not a regular file"),
        (["revoke", "nobody"], "nesa-node keys list"),
        (["list", "--jsonn"], "--json"),
    ],
)
def test_what_is_wrong_is_one_line_and_code_2(
    path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert run_command(["keys", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert words in said
    assert not path.exists()


def test_a_flag_and_a_config_file_say_where_the_keys_are(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_flag, by_file = tmp_path / "flag.json", tmp_path / "file.json"
    toml = tmp_path / "nesa.toml"
    toml.write_text(f'keys_path = "{by_file}"\nmodel = "m"\n', encoding="utf-8")
    say(capsys, "add", "alice", "--keys-path", str(by_flag))
    assert by_flag.exists()
    assert not path.exists()
    say(capsys, "list", "--config", str(toml))
    say(capsys, "add", "bob")
    assert path.exists()
    assert not by_file.exists()


def test_keys_live_in_the_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert default_keys_path() == Path("/somewhere/nesa-node/keys.json")


async def test_the_command_changes_who_may_use_a_gateway_that_runs(path: Path) -> None:
    def keys(*argv: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "nesa_node", "keys", *argv],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout.strip()

    first = await asyncio.to_thread(keys, "add", "alice")
    async with gate(path) as (_, address), browser(address) as client:

        async def status(key: str) -> int:
            return (await client.get("/v1/models", headers=bearer(key))).status_code

        assert await status(first) == 200
        second = await asyncio.to_thread(keys, "add", "bob")
        await asyncio.to_thread(keys, "revoke", "alice")
        await asyncio.sleep(1.1)
        assert (await status(first), await status(second)) == (401, 200)
