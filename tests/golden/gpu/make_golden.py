"""Compiles experiments for GPUs and keeps their optimized HLO as golden files.

    python tests/golden/gpu/make_golden.py        # every file
    python tests/golden/gpu/make_golden.py h100   # only files whose name contains the word

Needs the extra cuda, no GPU. XLA's compiler for GPUs chooses kernels by no measurement then.
"""

import gzip
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from asks import ASKS, GPU_DIR, ONE, asked

from meshscope.backends.compile.compile import compile_experiment


def main(word: str) -> None:
    """Writes `NAME.PHASE.txt.gz`, without the folders in which source files lie."""
    for name in (*ASKS, *ONE):
        if word not in name:
            continue
        experiment = asked(name)
        with TemporaryDirectory() as scratch:
            compile_experiment(experiment, Path(scratch), progress=lambda *_: None)
            for phase in experiment.phases:
                text = gzip.decompress((Path(scratch) / f"{phase}.hlo.txt.gz").read_bytes())
                plain = re.sub(r'"[^"\n]*/(\w+\.py)"', r'"\1"', text.decode())
                path = GPU_DIR / f"{name}.{phase}.txt.gz"
                path.write_bytes(gzip.compress(plain.encode(), mtime=0))
                sys.stdout.write(f"{path.name} {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
