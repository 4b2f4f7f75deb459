"""The root of a checkout links `compression` to `nesa_node/compression` (see its `__init__`)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import nesa_node.compression


def test_the_link_steps_aside_for_the_standard_library() -> None:
    source = Path(nesa_node.compression.__file__ or "")
    spec = importlib.util.spec_from_file_location(
        "compression", source, submodule_search_locations=[str(source.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    standard = os.path.join(os.path.dirname(os.__file__), "compression")
    assert list(module.__path__) == [standard]
    if sys.version_info >= (3, 14):
        assert os.path.isdir(standard)


def test_our_own_package_keeps_its_path() -> None:
    assert list(nesa_node.compression.__path__) == [
        str(Path(nesa_node.compression.__file__ or "").parent)
    ]
