"""Paths with `~`, and files without an end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.declaration import read_limited, user_path


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Path]:
    """A pipe with 1,001 letters whose writer never closes it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    os.write(descriptor, b"x" * 1001)
    yield path
    os.close(descriptor)


def test_a_home_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/one")
    assert user_path("~/x") == Path("/home/one/x")
    assert user_path(Path("a/~b")) == Path("a/~b")
    with pytest.raises(ConfigError, match="no home folder is known for ~no-such-user"):
        user_path("~no-such-user/x")


@pytest.mark.timeout(20)
def test_no_more_is_read_than_the_limit(endless: Path) -> None:
    with pytest.raises(ConfigError, match="has more than 1000 characters"):
        read_limited(endless, 1000)


def test_a_file_up_to_the_limit_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("é" * 10, encoding="utf-8")
    assert read_limited(path, 10) == "é" * 10
    with pytest.raises(ConfigError):
        read_limited(path, 9)
    with pytest.raises(OSError, match="No such file"):
        read_limited(tmp_path / "absent", 9)
