"""Runs the command `meshscope`, also as `python -m meshscope`."""

import sys


def main() -> None:
    """Runs the command line; Ctrl-C exits with 130, also while its modules are imported."""
    try:
        from meshscope.cli import main as run  # noqa: PLC0415

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
