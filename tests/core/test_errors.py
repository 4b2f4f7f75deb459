"""A client without the packages of the extra `node`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nesa_node.core.errors import NODE_MODULES, ConfigError, require_node
from tests.engine.tiny_models import BLOCKS
from tests.swarms import in_process_swarm, thirds

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "pip install 'nesa-node[node]', or '.[node]' in a clone"
BARE = """
import importlib.machinery, sys
MISSING = {"bitsandbytes", "gudhi", "sklearn"}
find = importlib.machinery.PathFinder.find_spec

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else find(name, path, target)

sys.meta_path[:] = [
    Finder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path
]
"""
"""As in an environment where they were never installed."""

SESSION = """
import torch
from nesa_node import AutoDistributedModelForCausalLM

with AutoDistributedModelForCausalLM.from_pretrained(
    sys.argv[1], initial_peers=sys.argv[2:], quality="blockwise8"
) as model:
    ids = torch.tensor([[5, 6, 7]])
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0
    )
print(result.shape[1])
"""
ERRORS = """
from nesa_node.core.errors import ConfigError
from nesa_node.compression.integer_codecs import _bitsandbytes_operators
from nesa_node.topology.shape.gudhi_backend import load_gudhi

for use in (_bitsandbytes_operators, load_gudhi):
    try:
        use()
    except ConfigError as error:
        print(error)
"""
COMMANDS = """
from nesa_node.cli.app import main

sys.argv[1:] = ["generate", "--help"]
main()
"""


def bare(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )


@pytest.mark.timeout(180)
def test_a_client_alone_generates(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where it asks for a codec that it cannot write: it is then sent plainly."""
    folder = tiny("llama")
    with in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses:
        done = bare(SESSION, str(folder), *addresses)
    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")


def test_help_needs_no_extra() -> None:
    done = bare(COMMANDS)
    assert done.returncode == 0
    assert "--initial-peers" in done.stdout


def test_what_is_missing_is_named_with_its_extra() -> None:
    done = bare(ERRORS)
    assert done.stdout.splitlines() == [
        f"sending in blockwise8 needs bitsandbytes: {INSTALL}",
        f"a swarm's shape needs gudhi, sklearn: {INSTALL}",
    ]


@pytest.mark.parametrize("command", ["run", "orchestrate", "demo"])
def test_a_command_that_needs_the_extra_says_so_at_once(command: str) -> None:
    done = bare(f"from nesa_node.cli.app import main\n\nsys.argv[1:] = [{command!r}]\nmain()")
    wanted = f"nesa-node {command} needs bitsandbytes, gudhi, sklearn: {INSTALL}"
    assert done.returncode == 2
    assert wanted in " ".join(done.stderr.split())


def test_the_extra_names_the_modules_that_are_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {Requirement(each).name for each in project["optional-dependencies"]["node"]}
    assert {name.replace("scikit-learn", "sklearn") for name in names} == set(NODE_MODULES)


def test_what_is_there_is_not_complained_about() -> None:
    require_node("everything")
    with pytest.raises(ConfigError, match="magic needs no_such: "):
        require_node("magic", "torch", "no_such")
