"""Runs that a command can read, and lines that cases begin with."""

import gzip
import shlex
import shutil
from pathlib import Path
from string import Template

import pytest
from tables import stored
from tests.conftest import Meshscope

import meshscope as package

DATA = Path(__file__).parent / "data"
GOLDEN = Path(__file__).parents[1] / "golden/hlo"
PROGRAMS = {
    "prefill.hlo.txt.gz": GOLDEN / "2xv6e_tp8sp_prefill.jax-0.10.2.txt.gz",
    "decode.hlo.txt.gz": GOLDEN / "2xv6e_tp8_decode.jax-0.10.2.txt.gz",
    "llama_two_layers.hlo.txt.gz": GOLDEN.parents[1]
    / "published/programs/tpu_inference_0.12-llama-8b-v6e_1x2-tp2-prefill8192-2layers.hlo.txt.gz",
}
ASKED: dict[str, str] = stored(DATA / "asked.yaml")


def words_of(line: str) -> list[str]:
    """The words of a command line, in which `$plan` stands for a line of asked.yaml."""
    return shlex.split(Template(line).substitute(ASKED))


def write_changed(file: str, source: str, *replaced: str) -> None:
    """Writes a copy of a file, in which each first text is replaced by the one behind it."""
    content = Path(source).read_bytes()
    text = (gzip.decompress(content) if source.endswith(".gz") else content).decode()
    for old, new in zip(replaced[::2], replaced[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(text)


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs that differ in their plan, and texts of programs."""
    folder = tmp_path_factory.mktemp("kept")
    shutil.copytree(DATA, folder, dirs_exist_ok=True)
    for name, path in PROGRAMS.items():
        (folder / name).symlink_to(path)
    step = (GOLDEN / "foreign_step.hlo.txt").read_text().splitlines(keepends=True)
    (folder / "cut_step.hlo.txt").write_text("".join(step[:28]))  # in the loop
    for name, plan in (("a", "tp=8"), ("b", "tp=8,sp"), ("c", "dp=2,tp=4")):
        asked = {"topology": "v6e-8", "plan": plan, "layers": 3, "batch": 2}
        package.predict("Qwen/Qwen3-32B", **asked, out=folder / name)
    return folder


@pytest.fixture
def here(kept: Path, meshscope: Meshscope, tmp_path: Path) -> Path:  # noqa: ARG001  it goes there
    """The current folder with the kept runs and texts."""
    shutil.copytree(kept, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path
