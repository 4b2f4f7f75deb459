"""`python -m nesa_node` and the console script are the `nesa-node` command.

Only the standard library is imported before `main` runs, so that Ctrl-C in the seconds of imports
ends the command like any other Ctrl-C.
"""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    from nesa_node.cli.interrupts import leaving_at_once
    from nesa_node.cli.output import open_closed_streams, write_any_character

    open_closed_streams()
    write_any_character()
    with leaving_at_once():
        from nesa_node.cli.app import main as run_app
    run_app()


if __name__ == "__main__":
    main()
