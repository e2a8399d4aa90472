"""The command line as a child of a sweep: `python -m meshscope.cli.child COMMAND WORDS`.

It ends when its parent is gone, which holds the other end of standard input: as by SIGTERM, so that
what is half-written is removed.
"""

from meshscope.cli.main import main
from meshscope.workers.worker_main import end_with_parent

GRACE_S = 15.0  # to unwind; then the process ends as it is

if __name__ == "__main__":
    end_with_parent(grace_s=GRACE_S)
    main()
