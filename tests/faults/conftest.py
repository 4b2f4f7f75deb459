from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.audit_outcomes import audit_outcomes
from tests.engine.tiny_models import reference
from tests.faults.bed import Bed, open_bed
from tests.faults.nursery import Nursery, open_nursery
from tests.faults.runs import JOINED, RECOVERIES
from tests.same_tokens import LEDGER


@pytest.fixture(scope="package")
def nursery() -> Iterator[Nursery]:
    with open_nursery() as nursery:
        yield nursery


@pytest.fixture(scope="session")
def tiny_llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="session")
def alone(tiny_llama: Path) -> PreTrainedModel:
    """The same model as transformers runs it, undisturbed."""
    model: PreTrainedModel = reference(tiny_llama)
    return model


@pytest.fixture
def bed(nursery: Nursery, tiny_llama: Path, tmp_path: Path) -> Iterator[Bed]:
    """A bed for one test, empty."""
    with open_bed(nursery, tiny_llama, tmp_path) as bed:
        yield bed


AUDITS: Counter[str] = Counter()
"""Outcomes of all audits; printed at the end of the run."""


@pytest.fixture(autouse=True)
def _audits_blame_no_node() -> Iterator[None]:
    yield
    outcomes = [audit_outcomes(model) for model in JOINED]
    JOINED.clear()
    for found in outcomes:
        AUDITS.update(found)
    assert not any({"failed", "unclear", "disputed"} & found.keys() for found in outcomes), outcomes


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for excuse in LEDGER.excuses:
        terminalreporter.write_line(f"excused: {excuse}")
    if AUDITS:
        terminalreporter.write_line(f"audits: {dict(AUDITS)}")
    for name, seconds in sorted(RECOVERIES.items()):
        ordered = sorted(seconds)
        p50, p95 = (ordered[round((len(ordered) - 1) * part)] for part in (0.5, 0.95))
        terminalreporter.write_line(
            f"recovery, {name}: {len(ordered)} runs, p50 {p50:.2f} s, p95 {p95:.2f} s, "
            f"longest {ordered[-1]:.2f} s"
        )
