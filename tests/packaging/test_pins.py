"""What the image installs is pinned by hashes, and at the versions that are tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
_PINNED = re.compile(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.M)


def _pinned() -> dict[str, str]:
    text = (ROOT / "deploy/requirements.txt").read_text(encoding="utf-8")
    return {canonicalize_name(name): version for name, version, _ in _PINNED.findall(text)}


def _constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("#")[0].strip().split("==") for line in lines if "==" in line]
    return {canonicalize_name(name): version for name, version in pairs}


def test_each_package_of_the_image_has_a_hash_and_the_tested_version() -> None:
    text = (ROOT / "deploy/requirements.txt").read_text(encoding="utf-8")
    pinned, tested = _pinned(), _constraints()
    assert len(pinned) == len(re.findall(r"^\w", text, re.M)), "a line without a hash"
    assert {name: tested.get(name) for name in pinned} == pinned


def test_whatever_the_package_needs_is_pinned_but_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["node"], *extras["otel"], *extras["attestation"]]
    names = {canonicalize_name(Requirement(each).name) for each in needed}
    assert names - _pinned().keys() == {"torch"}


def test_the_image_takes_nothing_without_a_hash_before_the_wheel() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    targets = re.findall(r"^FROM build AS build-\w+$", dockerfile, re.M)
    hashed = re.findall(r"--no-deps --require-hashes -r deploy/requirements\.txt", dockerfile)
    assert len(hashed) == len(targets) == 2


def test_the_image_is_one_of_a_node() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^ARG EXTRAS=(.*)$", dockerfile, re.M) == ["node,otel,attestation"] * 2
