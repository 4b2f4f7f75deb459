from __future__ import annotations

import shlex

import pytest

from tests.mutants.mistakes import ROOT, Mistake, mistakes


@pytest.mark.parametrize("mistake", mistakes(), ids=lambda mistake: mistake.name)
def test_mistake_can_still_be_made_and_its_tests_exist(mistake: Mistake) -> None:
    """When code moves, bring the list along."""
    source = (ROOT / mistake.file).read_text("utf-8")
    assert mistake.made_in(source) != source
    for argument in shlex.split(mistake.tests):
        if argument.startswith("tests/"):
            assert (ROOT / argument.split("::")[0]).exists(), argument
