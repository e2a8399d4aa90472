"""`python -m meshscope` is the command `meshscope`."""

from meshscope.cli.main import main

if __name__ == "__main__":
    main()
