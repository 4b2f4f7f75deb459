"""What the documents promise about the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nesa_node.core.errors import NesaError

ROOT = Path(__file__).resolve().parents[2]


def subclasses(cls: type[NesaError]) -> set[type[NesaError]]:
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))


def test_every_exit_code_is_documented() -> None:
    table = (ROOT / "docs/exit-codes.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)}
    assert {error.exit_code for error in subclasses(NesaError)} <= documented


def test_the_readme_shows_the_examples_that_are_tested() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    most_lines = {"generate.py": 6, "finetune.py": 9, "finetune_with_trainer.py": 16}
    for block, (name, most) in zip(blocks, most_lines.items(), strict=True):
        example = (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
        lines = [line for line in block.splitlines() if line]
        assert len([line for line in lines if "import" not in line]) <= most
        assert set(lines) <= set(example)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / target).exists(), target
