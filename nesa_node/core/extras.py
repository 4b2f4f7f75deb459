"""Packages that only some uses need, and the extras of `pyproject.toml` that install them."""

from __future__ import annotations

import importlib.util
from functools import cache

from nesa_node.core.errors import ConfigError

NODE = ("bitsandbytes", "gudhi", "sklearn")
"""Modules of the extra `node`, which clients and gateways do without."""


@cache
def is_installed(module: str) -> bool:
    """Whether a package is there. It is not imported."""
    return importlib.util.find_spec(module) is not None


def require_node(use: str, *modules: str) -> None:
    """Raises `ConfigError` with what to install if `use` needs a module that is missing.

    Without `modules` it needs all of the extra `node`.
    """
    missing = [module for module in modules or NODE if not is_installed(module)]
    if missing:
        raise ConfigError(
            f"{use} needs {', '.join(missing)}: pip install 'nesa-node[node]', "
            "or '.[node]' in a clone"
        )
