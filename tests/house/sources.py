"""The package's modules as syntax trees, for the rules and the counts of this folder."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PERSONS = re.compile(
    r"\b(who|whom|whoever|nobody|no one|somebody|someone|everybody|everyone|anybody|anyone"
    r"|others)\b",
    re.IGNORECASE,
)
"""Without "whose", which is the possessive of things too."""
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE = re.compile(r"`[^`\n]*`")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
MAX_NAME_CHARS = 60
"""Longer strings are texts, whose words are no names."""


@dataclass(frozen=True)
class Module:
    """One Python file of a checkout."""

    root: Path
    path: Path
    """Relative to `root`."""

    @cached_property
    def name(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def text(self) -> str:
        return (self.root / self.path).read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def classes(self) -> Iterator[str]:
        return (node.name for node in self.nodes if isinstance(node, ast.ClassDef))

    def imports(self) -> set[str]:
        """Dotted names that it imports, also in functions and for types only.

        `from a.b import c` imports `a.b` and `a.b.c`.
        """
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return found

    def strings(self) -> set[str]:
        """Its string constants."""
        values = (node.value for node in self.nodes if isinstance(node, ast.Constant))
        return {value for value in values if isinstance(value, str)}

    def identifiers(self) -> set[str]:
        """All names in it, those of its module, and words of short strings but docstrings."""
        found = set(self.name.split("."))
        docstrings = {node.value for node in self.nodes if isinstance(node, ast.Expr)}
        for node in self.nodes:
            match node:
                case ast.Constant() if node in docstrings:
                    pass
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    found.add(name)
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    found.add(name)
                case ast.AsyncFunctionDef(name=name) | ast.keyword(arg=str(name)):
                    found.add(name)
                case ast.alias(name=name):
                    found.update(name.split("."))
                case ast.Constant(value=str(text)) if len(text) < MAX_NAME_CHARS:
                    found.update(_IDENTIFIER.findall(text))
        return found

    def prose(self) -> Iterator[tuple[int, str]]:
        """Line number and text of each line of its docstrings and comments, without code spans."""
        for line, text in self._lines():
            yield line, _CODE.sub("", text)

    def code_spans(self) -> Iterator[tuple[int, str]]:
        """Line number and text of each code span in its docstrings and comments."""
        for line, text in self._lines():
            yield from ((line, span[1:-1]) for span in _CODE.findall(text))

    def _lines(self) -> Iterator[tuple[int, str]]:
        for first, text in (*self._docstrings(), *self._comments()):
            for offset, line in enumerate(text.split("\n")):
                yield first + offset, line

    def _docstrings(self) -> Iterator[tuple[int, str]]:
        for node in self.nodes:
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield node.lineno, text

    def _comments(self) -> Iterator[tuple[int, str]]:
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def modules_of(root: Path, *folders: str) -> list[Module]:
    """All modules of these folders of a checkout, sorted by path."""
    found = [path for folder in folders for path in (root / folder).rglob("*.py")]
    return [Module(root, path.relative_to(root)) for path in sorted(found)]


def importers(modules: list[Module], targets: list[Module]) -> dict[str, set[str]]:
    """For each target's name the names of those among `modules` that import it."""
    names = {module.name for module in targets}
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in module.imports() & names - {module.name}:
            found[name].add(module.name)
    return found


def circles(modules: list[Module]) -> list[set[str]]:
    """Sets of modules that import each other, for types only or in functions included."""
    names = {module.name for module in modules}
    graph = {
        module.name: {
            name
            for name in module.imports() & names
            # a package that is imported for a module of its own is no circle
            if not module.name.startswith(f"{name}.") and name != module.name
        }
        for module in modules
    }
    return [group for group in _strongly_connected(graph) if len(group) > 1]


def _strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            cut = stack.index(name)
            groups.append(set(stack[cut:]))
            del stack[cut:]

    for name in graph:
        if name not in index:
            visit(name)
    return groups


def reachable(modules: list[Module], first: set[str]) -> set[str]:
    """Names of the modules that `first` import, directly or through others, and `first`.

    Names in strings count as imports: some modules are loaded by name, or run as a program.
    """
    names = {module.name: module for module in modules}
    found: set[str] = set()
    waiting = [name for name in first if name in names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += names.keys() & (names[name].imports() | names[name].strings())
    return found


def folders_of(modules: list[Module]) -> dict[Path, int]:
    """How many modules lie directly in each folder, `__init__.py` not counted."""
    counts: dict[Path, int] = defaultdict(int)
    for module in modules:
        if module.path.name != "__init__.py":
            counts[module.path.parent] += 1
    return dict(counts)


def doubled_classes(modules: list[Module]) -> dict[str, list[str]]:
    """Class names that are defined more than once, with the modules that define them."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for name in module.classes():
            places[name].append(module.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def persons(modules: list[Module]) -> tuple[list[str], int]:
    """Places with an indefinite person, and the number of words of prose."""
    found: list[str] = []
    words = 0
    for module in modules:
        for line, text in module.prose():
            words += len(_WORD.findall(text))
            found += [f"{module.path}:{line}: {match[0]}" for match in PERSONS.finditer(text)]
    return found, words


def persons_in(line: str) -> list[str]:
    """Indefinite persons in a line of prose, code spans left out."""
    return [match[0] for match in PERSONS.finditer(_CODE.sub("", line))]


def settings_declared(root: Path, folder: str, suffixes: tuple[str, ...]) -> dict[str, set[str]]:
    """Annotated class fields in `folder` by name, of classes whose name ends in a suffix."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules_of(root, folder):
        for node in module.nodes:
            if not isinstance(node, ast.ClassDef) or not node.name.endswith(suffixes):
                continue
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    found[item.target.id].add(f"{module.name}.{node.name}")
    return found


def settings_twice(root: Path) -> dict[str, set[str]]:
    """Settings that a config model declares, and the command line once more."""
    models = settings_declared(root, "nesa_node/core", ("Config", "Settings"))
    flags = settings_declared(root, "nesa_node/cli", ("Flags", "Options", "Settings"))
    return {name: models[name] | flags[name] for name in sorted(models.keys() & flags.keys())}
