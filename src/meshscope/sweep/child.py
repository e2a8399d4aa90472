"""The command line as a child of a sweep: `python -m meshscope.sweep.child COMMAND WORDS`.

The parent holds the other end of standard input. When it is gone the child ends as by SIGTERM, so
that half-written folders are removed.
"""

import runpy

from meshscope.workers import end_with_parent

GRACE_S = 15.0  # to clean up after SIGTERM; then the process is ended by force

if __name__ == "__main__":
    end_with_parent(grace_s=GRACE_S)
    runpy.run_module("meshscope", run_name="__main__", alter_sys=True)
