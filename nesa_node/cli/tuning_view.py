"""Terminal output of a logged tuning decision, from a study of stored snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text


def print_tuning(console: Console, name: str, when: str, body: Mapping[str, Any]) -> None:
    """Print the exponents of the greedy rule with their reason, and the result for schemas."""
    done = "changed" if body["published"] else "nothing was changed"
    console.print(Text(f"{name}, {when}: {done}\nmodel {body['model']}"))
    if body["candidates"]:
        console.print(
            Text(
                f"{body['candidates']} candidates each, by the genetic algorithm and by chance, on "
                f"{body['learnt_from']} sessions; judged on {body['held_out']} that came later"
            )
        )
    console.print(Text(f"exponents: {body['reason']}"))
    values = ", ".join(f"{term} {value:.3g}" for term, value in body["exponents"].items())
    console.print(Text(f"in use (version {body['version']}): {values}"))
    console.print(Text(f"schemas: {body['schemas']}"))
