"""Runs the command `meshscope`, also as `python -m meshscope`."""

import signal
import sys
from types import FrameType


def main() -> None:
    """Runs the command line; Ctrl-C exits with 130, also while its modules are imported."""
    interrupts = list[int]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background
        signal.signal(signal.SIGINT, interrupt)
    try:
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
