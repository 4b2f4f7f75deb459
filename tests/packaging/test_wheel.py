"""What an installation would hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("routing", "sharding", "topology", "compression")


def build_wheel(tmp_path: Path) -> Path:
    """From a copy, since setuptools writes into the folder that it builds."""
    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(
        ROOT / "nesa_node", source / "nesa_node", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    for name in LINKS:
        (source / name).symlink_to(f"nesa_node/{name}")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=50)
    return next(tmp_path.glob("*.whl"))


def test_wheel_holds_our_package_once_and_nothing_else(tmp_path: Path) -> None:
    names = zipfile.ZipFile(build_wheel(tmp_path)).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "nesa_node",
        next(name for name in names if name.endswith("/METADATA")).partition("/")[0],
    }
    assert "nesa_node/py.typed" in names
    assert "nesa_node/topology/tables/gcp.json" in names
    assert "nesa_node/topology/tables/gcp.LICENSE" in names
    assert "nesa_node/web/login_page.html" in names
    assert "nesa_node/web/login_page.css" in names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "nesa_node").rglob("*.py")}
    assert sources <= set(names)


def test_links_at_the_root_are_relative_and_point_into_the_package() -> None:
    for name in LINKS:
        link = ROOT / name
        assert link.is_symlink()
        assert link.readlink() == Path("nesa_node") / name
