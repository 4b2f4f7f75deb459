"""`nesa-node adapters` against daemons that run, with an adapter that PEFT wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nesa_node
from nesa_node.cli.app import run_command
from nesa_node.cli.services.local_swarm import LocalNode, local_swarm
from nesa_node.core.ids import Span
from tests.cli.tiny import BLOCKS, write_tiny_model
from tests.engine.adapter_folders import lora_tensors, safetensors, save_with_peft, write_adapter
from tests.swarms import in_process_swarm

ABSENT = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_peft(model, tmp_path_factory.mktemp("trained") / "polite")


@pytest.fixture(scope="module")
def nodes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LocalNode]]:
    folder = tmp_path_factory.mktemp("swarm")
    flags = ("--device", "cpu", "--threads", "1", "--cache-dir", str(folder / "cache"))
    with local_swarm(model, [Span(0, 2), Span(2, BLOCKS)], folder, flags=flags) as running:
        yield running


@pytest.fixture
def flags(nodes: list[LocalNode], tmp_path: Path) -> list[str]:
    peers = ["--initial-peers", *nodes[0].addresses]
    return [*peers, "--identity-path", str(tmp_path / "author.key")]


def told(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> str:
    assert run_command(["adapters", *map(str, argv)]) == code
    output = capsys.readouterr()
    return output.err if code else output.out


def test_an_adapter_is_published_listed_pulled_and_removed(
    flags: list[str],
    model: Path,
    adapter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    said = told(capsys, "list", "tiny", *flags)
    assert said.startswith("no adapter is published for tiny@")
    options = ["--description", "kind words", "--metric", "eval_loss=1.5", "--metric", "steps=40"]
    said = told(capsys, "publish", model, adapter, *options, *flags)
    assert said.rstrip().endswith("KiB on 2 nodes")
    author = said.split("/")[0]
    heading, row = told(capsys, "list", "tiny", *flags).splitlines()
    assert heading.split()[:5] == ["NAME", "AUTHOR", "SIZE", "RANK", "MODULES"]
    assert row.split()[:2] == ["polite", f"…{author[-8:]}"]
    assert "q_proj v_proj" in row
    assert "eval_loss 1.5, steps 40" in row
    assert row.rstrip().endswith("kind words")
    (shown,) = json.loads(told(capsys, "list", "tiny", "--json", *flags))
    assert (shown["name"], shown["author"], shown["rank"]) == ("polite", author, 4)
    said = told(capsys, "pull", "tiny", f"{author[-8:]}/polite", *flags)
    assert said.startswith(f"polite: {author}/polite, ")
    assert (tmp_path / "polite" / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()
    said = told(capsys, "pull", "tiny", "polite", *flags, code=2)
    assert said == "error: polite exists; give another folder (--output)\n"
    told(capsys, "pull", "tiny", "polite", "--output", tmp_path / "new" / "copy", *flags)
    assert (tmp_path / "new" / "copy" / WEIGHTS).is_file()
    assert told(capsys, "remove", "tiny", "polite", *flags) == "polite: no longer published\n"
    assert told(capsys, "list", "tiny", *flags).startswith("no adapter is published")
    said = told(capsys, "pull", "tiny", "polite", "--output", "x", *flags, code=3)
    assert said == "error: no adapter 'polite' is published; `nesa-node adapters list`\n"


def test_the_same_from_python(nodes: list[LocalNode], adapter: Path, tmp_path: Path) -> None:
    access: dict[str, Any] = {
        "initial_peers": nodes[1].addresses,
        "identity_path": tmp_path / "author.key",
    }
    copies = nesa_node.publish_adapter("tiny", adapter, name="from-python", **access)
    (listed,) = nesa_node.list_adapters("tiny", **access)
    assert listed == copies.adapter
    folder = nesa_node.fetch_adapter("tiny", "from-python", tmp_path / "pulled", **access)
    assert (folder / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()
    nesa_node.remove_adapter("tiny", "from-python", **access)
    assert nesa_node.list_adapters("tiny", **access) == ()


def test_what_cannot_be_published_is_one_line(
    flags: list[str], adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = write_adapter(tmp_path / "wide", rank=4, lora_alpha=0)
    for argv, code, words in (
        (["publish", "tiny", tmp_path / "none"], 3, "is not an adapter that can be published"),
        (["publish", "tiny", wide], 3, "lora_alpha"),
        (["publish", "tiny", adapter, "--name", "A B"], 2, "--name 'A B': 1 to 64"),
        (["publish", "tiny", adapter, "--metric", "loss"], 2, "--metric loss: a name and a"),
        (["publish", "tiny", adapter, "--metric", "loss=nan"], 2, "metrics.loss"),
        (["publish", "other", adapter], 5, "no node serves other in this swarm"),
        (["remove", "tiny", "polite"], 3, "not published for this model by this identity"),
        (["pull", "tiny", "a/polite"], 3, "give at least the last 6 characters"),
    ):
        said = told(capsys, *argv, *flags, code=code)
        assert said.startswith("error: ")
        assert words in said
        assert said.count("\n") == 1


def test_an_adapter_of_another_model_is_refused_here_and_by_nodes(
    flags: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = write_adapter(tmp_path / "foreign", weights=safetensors(lora_tensors(size=48)))
    here = told(capsys, "publish", model, foreign, *flags, code=3)
    there = told(capsys, "publish", "tiny", foreign, *flags, code=5)
    for said in (here, there):
        assert "it was trained for another model" in said


def test_without_a_swarm_nothing_is_published(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = ["--identity-path", str(tmp_path / "author.key")]
    said = told(capsys, "publish", "tiny", adapter, "--initial-peers", ABSENT, *identity, code=5)
    assert said.splitlines()[-1].startswith("error: none of the initial peers answered")


def test_a_private_swarms_adapters_lie_apart(model: Path, adapter: Path, tmp_path: Path) -> None:
    """Daemons of other swarms share the cache, and serve what lies in their folder."""
    cache, key = tmp_path / "cache", "a long swarm key"
    spans = [Span(0, BLOCKS)]
    with in_process_swarm(model, spans, tmp_path, cache_dir=cache, swarm_key=key) as addresses:
        copies = nesa_node.publish_adapter(
            "tiny",
            adapter,
            initial_peers=addresses,
            identity_path=tmp_path / "author.key",
            swarm_key=key,
        )
    (folder,) = (cache / "adapters").iterdir()
    assert folder.name.startswith("private-")
    assert (folder / copies.adapter.digest / WEIGHTS).is_file()
