"""Runs the command `meshscope`, also as `python -m meshscope`."""

import os
import sys

HELP_COLUMNS = 80  # from which on the text of --help is that of help.txt


def main() -> None:
    """Runs the command line; Ctrl-C exits with 130, also while modules are imported, those of Python included."""
    interrupts = list[int]()

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
        if sys.argv[1:] in (["--help"], ["-h"]) and _shows_help():
            return
        # NumPy's products are small here: starting threads for them takes longer than they do.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        import signal  # noqa: PLC0415

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background
            signal.signal(signal.SIGINT, interrupt)
        from meshscope.cli import main as run  # noqa: PLC0415

        run()
    except BaseException as error:
        if interrupts or isinstance(
            error, KeyboardInterrupt
        ):  # NumPy makes an ImportError of the interruption
            sys.exit(130)
        raise


def _shows_help() -> bool:
    """Prints the stored help of all commands, as importing the command line takes five times as long; whether it could."""
    try:
        columns = int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
    except ValueError:
        return False
    except OSError:  # no terminal
        columns = HELP_COLUMNS
    if columns < HELP_COLUMNS or "_MESHSCOPE_COMPLETE" in os.environ:
        return False
    try:
        with open(f"{os.path.dirname(__file__)}/help.txt", encoding="utf-8") as stored:  # noqa: PTH120, PTH123  pathlib is slow to import
            sys.stdout.write(stored.read())
        sys.stdout.flush()
    except (AttributeError, OSError):  # the command line says why
        return False
    return True


if __name__ == "__main__":
    main()
