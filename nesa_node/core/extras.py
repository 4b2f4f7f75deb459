"""Optional packages, and the extras of `pyproject.toml` that install them."""

from __future__ import annotations

import importlib.util
from functools import cache

from nesa_node.core.errors import ConfigError

NODE_MODULES = ("bitsandbytes", "gudhi", "sklearn")
"""Modules of the extra `node`; clients and gateways do not need them."""


@cache
def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def require_node(use: str, *modules: str) -> None:
    """Check that `modules`, by default all of the extra `node`, are installed for `use`.

    Raises `ConfigError` that says what to install.
    """
    missing = [module for module in modules or NODE_MODULES if not is_installed(module)]
    if missing:
        raise ConfigError(
            f"{use} needs {', '.join(missing)}: pip install 'nesa-node[node]', "
            "or '.[node]' in a clone"
        )
