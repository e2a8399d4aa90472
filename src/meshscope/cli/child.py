"""The command line as a child of a sweep: `python -m meshscope.cli.child COMMAND WORDS`.

It ends when its parent is gone, which holds the other end of standard input: as by SIGTERM, so that
what is half-written is removed.
"""

import os
import signal
import sys
import threading
import time

from meshscope.cli.main import main

GRACE_S = 15.0  # to unwind; then the process ends as it is


def end_with_parent() -> None:
    """Ends this process when its parent is gone, however that ended."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    main()
