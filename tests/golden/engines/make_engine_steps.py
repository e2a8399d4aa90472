"""Compiles the steps of `engine_steps.py` with the engines and stores their HLO texts.

Run: python tests/golden/engines/make_engine_steps.py [NAME...], after `meshscope engines install vllm-tpu`
for each release. Without names it makes all: half an hour on two cores. The texts lack local paths and
what no reader reads: the bodies of kernels.
"""

import gzip
import lzma
import re
import sys
import tempfile
from pathlib import Path

from engine_steps import CASES, FOLDER

import meshscope

_BODY = re.compile(r'"body":"[^"]*"')
_PATH = re.compile(r'"/[^"]*/(site-packages|meshscope)/')


def main(names: list[str]) -> None:
    """Compiles the cases with these names, or all."""
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            run = meshscope.compile(**CASES[name].arguments, out=Path(folder) / "run")
            store(name, run.path / "hlo")
        sys.stdout.write(f"{name}\n")


def store(name: str, folder: Path) -> None:
    """Stores the programs and reports of a run's `hlo` folder under a case."""
    home = FOLDER / name
    home.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*.hlo.txt.gz")):
        (home / path.name).with_suffix(".xz").write_bytes(shortened(path))
    for path in folder.glob("*.json"):
        (home / path.name).write_bytes(path.read_bytes())


def shortened(path: Path) -> bytes:
    """The compressed text without bodies of kernels and local paths."""
    text = gzip.decompress(path.read_bytes()).decode()
    text = _PATH.sub(r'"\1/', _BODY.sub('"body":""', text))
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


if __name__ == "__main__":
    main(sys.argv[1:])
