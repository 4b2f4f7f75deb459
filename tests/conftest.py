"""Every test runs offline, on one torch thread, in a temporary folder of its own run, and leaves
nothing behind: no process, no listening port, no asyncio task, no temporary file.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.leaks import RUN_VARIABLE, Leftovers

_WORKER = os.environ.get("PYTEST_XDIST_WORKER")

# A busy machine takes longer than the 200 ms that an example has by default.
settings.register_profile("without_deadline", deadline=None)
settings.load_profile("without_deadline")


def _run_dir() -> Path:
    """Short, since paths of unix sockets must stay below 108 bytes.

    A worker's is in that of the run, which removes it even when workers are killed.
    """
    if _WORKER is None:
        return Path(tempfile.mkdtemp(prefix="nn", dir="/tmp" if Path("/tmp").is_dir() else None))
    folder = Path(os.environ["NN_TEST_FOLDER"], _WORKER)
    folder.mkdir()
    return folder


_RUN_DIR = _run_dir()
_TMP = _RUN_DIR / "t"


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the environment before a test module can import torch or transformers."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # What a shell starts in the background ignores it, and so would the tests of interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _TMP.mkdir()
    tempfile.tempdir = str(_TMP)
    os.environ.update(
        NN_TEST_FOLDER=str(_RUN_DIR),
        TMPDIR=str(_TMP),
        # torch makes this folder on import and leaves it.
        TORCHINDUCTOR_CACHE_DIR=str(_RUN_DIR / "inductor"),
        XDG_STATE_HOME=str(_RUN_DIR / "state"),
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
    )
    os.environ[RUN_VARIABLE] = uuid.uuid4().hex
    for name in [name for name in os.environ if name.startswith("NESA_")]:
        del os.environ[name]
    # A worker's is its own: the one that pytest-xdist gives it has a longer path.
    if config.option.basetemp is None or _WORKER is not None:
        config.option.basetemp = str(_RUN_DIR / "p")


def pytest_unconfigure() -> None:
    shutil.rmtree(_RUN_DIR, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `save_tiny_model` keeps each model for the whole run."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny(models_dir: Path) -> Callable[[str], Path]:
    """The folder of a family's small random model, made once in a run."""
    from tests.engine.tiny_models import save_tiny_model

    return lambda family: save_tiny_model(family, models_dir)


@pytest.fixture(autouse=True, scope="session")
def _session_leaves_nothing() -> Iterator[None]:
    before = Leftovers.now(_TMP)
    yield
    _check(before, "the whole run")


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    before = Leftovers.now(_TMP)
    yield
    _check(before, str(request.node.nodeid))


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before the test's own fixtures, hence torn down after them."""
    before = Leftovers.now(_TMP)
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("_no_task_left")
    yield
    _check(before, str(request.node.nodeid))


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=1)
    names = sorted(f"{task.get_name()}: {task.get_coro()!r}" for task in left if not task.done())
    if names:
        pytest.fail("asyncio tasks left running:\n  " + "\n  ".join(names), pytrace=False)


def _check(before: Leftovers, who: str) -> None:
    left = before.wait_until_gone(_TMP, timeout_s=3)
    if left:
        pytest.fail(f"{who} left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def structlog_given_back() -> Iterator[None]:
    """`capture_logs` of one test would leave structlog configured: it prints to stdout then."""
    import structlog

    before = structlog.is_configured()
    yield
    if not before:
        structlog.reset_defaults()


@pytest.fixture
def logging_given_back() -> Iterator[None]:
    """What a test set up for the log of a process of its own is undone."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
