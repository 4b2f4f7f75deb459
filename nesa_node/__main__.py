"""`python -m nesa_node` and the console script are the `nesa-node` command.

Only the standard library is imported before `main` runs, so that Ctrl-C in the seconds of imports
ends the command like any other Ctrl-C.
"""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    from nesa_node.cli.process_setup import exit_on_interrupt

    with exit_on_interrupt():
        from nesa_node.cli.standard_streams import escape_unencodable_output, open_closed_streams

        open_closed_streams()
        escape_unencodable_output()
        from nesa_node.cli.app import main as run_app
    run_app()


if __name__ == "__main__":
    main()
