"""The programs of one decode and one prefill step of vLLM on TPU, with two layers of Qwen3-32B.

Run: python tests/golden/engines/make_engine_steps.py, after `meshscope engines install vllm-tpu`.
Writes the HLO texts without the bodies of kernels, which nothing reads, and without local paths.
"""

import gzip
import re
import tempfile
from pathlib import Path

import meshscope

FOLDER = Path(__file__).parent
MODEL, TOPOLOGY, PLAN = "Qwen/Qwen3-32B", "v6e-8", "tp=8"
LAYERS, BATCH, PROMPT, OUTPUT = 2, 16, 512, 128
_BODY = re.compile(r'"body":"[^"]*"')
_PATH = re.compile(r'"/[^"]*/(site-packages|meshscope)/')


def main() -> None:
    """Compiles with the newest release that is installed."""
    with tempfile.TemporaryDirectory() as folder:
        run = meshscope.compile(
            MODEL,
            topology=TOPOLOGY,
            plan=PLAN,
            frontend="vllm-tpu",
            layers=LAYERS,
            batch=BATCH,
            prompt=PROMPT,
            output=OUTPUT,
            out=Path(folder) / "run",
        )
        assert run.path is not None
        for path in sorted((run.path / "hlo").glob("*.hlo.txt.gz")):
            (FOLDER / path.name).write_bytes(shortened(path))
        for path in (run.path / "hlo").glob("*.json"):
            (FOLDER / path.name).write_bytes(path.read_bytes())


def shortened(path: Path) -> bytes:
    """The gzipped text without bodies of kernels and local paths."""
    text = gzip.decompress(path.read_bytes()).decode()
    text = _PATH.sub(r'"\1/', _BODY.sub('"body":""', text))
    return gzip.compress(text.encode(), 9, mtime=0)


if __name__ == "__main__":
    main()
