"""Runs the command `meshscope` as `python -m meshscope`."""

from meshscope.cli.main import main

if __name__ == "__main__":
    main()
