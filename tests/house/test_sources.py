"""Each rule of this folder notices what it forbids."""

from __future__ import annotations

from pathlib import Path

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


def checkout(root: Path, **files: str) -> list[Module]:
    """The package of a checkout with these files: `cli_app` is `nesa_node/cli/app.py`."""
    for name, text in files.items():
        path = root / "nesa_node" / f"{name.replace('_', '/', 1)}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return modules_of(root, "nesa_node")


def test_class_that_two_modules_define_is_found(tmp_path: Path) -> None:
    modules = checkout(tmp_path, a="class Lane: ...", b="class Lane: ...\nclass Page: ...")
    assert doubled_classes(modules) == {"Lane": ["nesa_node.a", "nesa_node.b"]}


def test_persons_in_docstrings_and_comments_are_found(tmp_path: Path) -> None:
    text = '"""Whoever asks, `who` in code, a node whose peer."""\nx = "nobody"  # others wait\n'
    found, words = persons(checkout(tmp_path, a=text))
    assert found == ["nesa_node/a.py:1: Whoever", "nesa_node/a.py:2: others"]
    assert words == 10
    assert persons_in("Somebody runs `who`.") == ["Somebody"]


def test_modules_of_a_folder_are_counted_without_its_init(tmp_path: Path) -> None:
    modules = checkout(tmp_path, cli_a="", cli_b="", cli___init__="", c="")
    assert folders_of(modules) == {Path("nesa_node/cli"): 2, Path("nesa_node"): 1}


def test_module_that_only_an_unused_one_imports_is_not_reachable(tmp_path: Path) -> None:
    modules = checkout(
        tmp_path,
        main="import nesa_node.used\nPROGRAM = 'nesa_node.started'",
        used="def f():\n    from nesa_node import later",
        later="",
        started="",
        unused="from nesa_node.helper import x",
        helper="x = 1",
    )
    found = reachable(modules, {"nesa_node.main"})
    assert found == {f"nesa_node.{name}" for name in ("main", "used", "later", "started")}


def test_circles_through_functions_are_found(tmp_path: Path) -> None:
    modules = checkout(
        tmp_path,
        a="from nesa_node.b import x",
        b="def f():\n    import nesa_node.c",
        c="import nesa_node.a",
        d="import nesa_node.a",
    )
    assert circles(modules) == [{"nesa_node.a", "nesa_node.b", "nesa_node.c"}]


def test_setting_that_a_flag_declares_again_is_found(tmp_path: Path) -> None:
    checkout(
        tmp_path,
        core_settings="class NodeConfig:\n    port: int\n    name: str",
        cli_flags="class NodeFlags:\n    port: int\n    json: bool",
    )
    assert list(settings_twice(tmp_path)) == ["port"]


def test_code_spans_and_identifiers_are_told_from_prose(tmp_path: Path) -> None:
    text = '"""Of `old_name`, told."""\ndef new_name(size=1):\n    return {"key": size.x}  # `y`\n'
    (module,) = checkout(tmp_path, a=text)
    assert list(module.code_spans()) == [(1, "old_name"), (3, "y")]
    assert module.identifiers() == {"nesa_node", "a", "new_name", "size", "key", "x"}
