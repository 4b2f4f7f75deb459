"""Rules about the repository itself. Each allow-list names its reasons."""

from __future__ import annotations

import ast
import keyword
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.counts import MAX_MODULES, ROOT
from tests.house.sources import (
    Module,
    circles,
    doubled_classes,
    folders_of,
    modules_of,
    persons,
    persons_in,
    reachable,
    settings_twice,
)

PACKAGE = modules_of(ROOT, "nesa_node")
CODE = [*PACKAGE, *modules_of(ROOT, "tests", "benchmarks", "examples")]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
PROSE = [*DOCUMENTS, *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]

ENTRY_POINTS = {
    "nesa_node": "what `import nesa_node` exports, by name",
    "nesa_node.__main__": "the console script",
}
"""Modules that run without being imported by another module of the package."""

COMING_FOLDERS = {"training/", "verification/"}
"""Folders that ARCHITECTURE.md names as coming with later work."""

WORDS_OF_EXAMPLES = {
    "Class.method": "stands for any method, as `file.py` for any module",
    "file.py": "see `Class.method`",
    "xfail": "of pytest",
    "test_chain_avoids_banned_node": "an example of a test's name",
}
"""What the documents write like code although it is not in the code."""

_FILE_NAME = re.compile(r"\.(json|md|toml)$")

FOREIGN_MODULES = {*sys.stdlib_module_names, "bitsandbytes", "gudhi"}
FOREIGN_NAMES = {
    "HFLM": "of lm-evaluation-harness",
    "P2P": "of hivemind",
    "PrivateKey": "of libp2p's protobuf",
    "PublicKey": "of libp2p's protobuf",
    "PYTHONUNBUFFERED": "of Python",
    "allOf": "of JSON schemas",
    "iterencode": "of json",
    "ldtilecfg": "an instruction of x86",
    "multipleOf": "of JSON schemas",
    "nesa_": "a prefix of metrics",
    "otel": "an extra of the package",
    "patternProperties": "of JSON schemas",
}
"""Names in docstrings and comments that our code does not use."""


def test_class_name_exists_once() -> None:
    assert not doubled_classes(PACKAGE)


def test_prose_of_code_names_no_indefinite_person() -> None:
    found, words = persons(PACKAGE)
    assert words > 10_000
    assert not found


@pytest.mark.parametrize("document", PROSE)
def test_prose_of_documents_names_no_indefinite_person(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    # Blocks of code show output and prompts.
    prose = re.sub(r"^```.*?^```", _same_lines, text, flags=re.DOTALL | re.MULTILINE)
    assert not [
        f"{document}:{number}: {word}"
        for number, line in enumerate(prose.splitlines(), 1)
        for word in persons_in(line)
    ]


def test_folder_has_few_modules() -> None:
    crowded = {str(f): n for f, n in folders_of(PACKAGE).items() if n > MAX_MODULES}
    assert not crowded


def test_no_module_is_for_tests_alone() -> None:
    names = {module.name for module in PACKAGE if module.path.name != "__init__.py"}
    lonely = names - reachable(PACKAGE, set(ENTRY_POINTS))
    assert not lonely


def test_entry_points_exist() -> None:
    assert set(ENTRY_POINTS) <= {module.name for module in PACKAGE}


def test_setting_is_declared_once() -> None:
    twice = settings_twice(ROOT)
    assert not [f"{name}: {', '.join(sorted(places))}" for name, places in twice.items()]


def test_modules_import_each_other_in_no_circle() -> None:
    assert not [sorted(circle) for circle in circles(PACKAGE)]


def test_architecture_has_a_line_for_each_folder() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(nesa_node/[\w/]*)/` \|.*\|(.*)\|$", text, flags=re.MULTILINE))
    folders = {str(folder) for folder in folders_of(PACKAGE)} - {"nesa_node"}
    assert sorted(rows) == sorted(folders)
    started = [
        (folder, path) for folder in rows for path in re.findall(r"`(\w+\.py)`", rows[folder])
    ]
    assert not [
        f"{folder}/{path}" for folder, path in started if not (ROOT / folder / path).is_file()
    ]


def test_docstrings_and_comments_name_what_exists() -> None:
    known = {*keyword.kwlist, *FOREIGN_NAMES}.union(*(module.identifiers() for module in PACKAGE))
    assert not [
        f"{module.path}:{line}: {span}"
        for module in PACKAGE
        for line, span in module.code_spans()
        if not _is_known(span, known)
    ]


@pytest.mark.parametrize("document", PROSE)
def test_document_names_modules_that_exist(document: str) -> None:
    paths = [span for span in _code_spans(document) if re.fullmatch(r"[\w/]+\.py", span)]
    assert not [path for path in paths if path not in WORDS_OF_EXAMPLES and not _exists(path)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_names_what_exists(document: str) -> None:
    """Paths, and names in code's spelling, in backticks."""
    known = _known_words(CODE)
    missing = []
    for span in _code_spans(document):
        if span in WORDS_OF_EXAMPLES or span in COMING_FOLDERS:
            continue
        if re.fullmatch(r"[\w/.-]+\.(py|md|toml|js|json|html)|[\w/.-]+/", span):
            if not _exists(span):
                missing.append(span)
        elif re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span):
            parts = span.removesuffix("()").split(".")
            if not all(part in known for part in parts if part):
                missing.append(span)
    assert not missing


def test_architecture_names_functions_where_they_are() -> None:
    """In "`file.py` `Class.method`" the file defines the class, and the class the method."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    pairs = re.findall(r"`([\w/]+\.py)` `([A-Za-z_][\w.]*)`", text)
    assert len(pairs) > 30
    assert not [
        f"{path} {name}"
        for path, name in pairs
        if name not in WORDS_OF_EXAMPLES
        and not any(name in _definitions(module) for module in _modules_at(path))
    ]


def test_architecture_names_methods_that_exist() -> None:
    """Also where no file stands before them."""
    defined = {name for module in PACKAGE for name in _definitions(module)}
    spans = _code_spans("ARCHITECTURE.md")
    names = [span for span in spans if re.fullmatch(r"[A-Z]\w+(\.[a-z_]\w*)?", span)]
    assert not [name for name in names if name not in {*defined, *WORDS_OF_EXAMPLES}]


def _same_lines(block: re.Match[str]) -> str:
    return "\n" * block[0].count("\n")


def _code_spans(document: str) -> list[str]:
    text = (ROOT / document).read_text("utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def _is_known(span: str, known: set[str]) -> bool:
    """Whether code in prose names a module or names that exist, or is another kind of code."""
    if re.fullmatch(r"[\w/]+\.py", span):
        return _exists(span)
    if not re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span) or _FILE_NAME.search(span):
        return True
    first, *rest = span.removesuffix("()").split(".")
    return (bool(rest) and first in FOREIGN_MODULES) or all(
        part in known for part in (first, *rest)
    )


def _exists(name: str) -> bool:
    """Whether the path of a file or folder ends in this."""
    parts = Path(name).parts
    return any(path.parts[-len(parts) :] == parts for path in _paths())


@cache
def _paths() -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.name not in (".venv", ".git", "build")]
    return [*found, *(path for folder in found if folder.is_dir() for path in folder.rglob("*"))]


def _known_words(modules: list[Module]) -> set[str]:
    words: set[str] = set()
    for module in modules:
        words.update(re.findall(r"[A-Za-z_]\w*", module.text))
        words.update(module.name.split("."))
    return words


def _modules_at(path: str) -> list[Module]:
    parts = Path(path).parts
    return [module for module in PACKAGE if module.path.parts[-len(parts) :] == parts]


def _definitions(module: Module) -> set[str]:
    """Classes, functions, constants, and methods and fields as `Class.name`."""
    found = set(_names_in(module.tree.body))
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{name}" for name in _names_in(node.body))
    return found


def _names_in(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
