"""Runs the command `meshscope`, also as `python -m meshscope`."""

import sys


def main() -> None:
    """Runs the command line; Ctrl-C exits with 130, also while modules are imported, those of Python included."""
    interrupts = list[int]()

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
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


if __name__ == "__main__":
    main()
