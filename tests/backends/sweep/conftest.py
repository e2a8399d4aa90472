"""A Google Cloud in a folder, with gcloud and the tools of its VMs."""

import json
import os
import signal
import sys
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STAND_IN = Path(__file__).with_name("gcloud.py")

# What the scripts on a worker call. `python3 -m uv` makes an environment whose meshscope writes the
# prediction of the experiment as a measured run, a copy of the first one; batch 7 fails, and batch 9 takes 20 s.
PYTHON3 = """#!/bin/bash
case "$*" in
  "-m pip install --quiet --user uv") ;;
  "-m uv venv --quiet --clear --python 3.11 $HOME/meshscope/env") mkdir -p "$HOME/meshscope/env/bin" ;;
  "-m uv pip install --quiet --python $HOME/meshscope/env/bin/python meshscope"*" @ file://$HOME/m"*".whl jax[tpu]=="*)
    echo "$*" >>"$CLOUD/installed"
    cp "$(dirname "$0")/meshscope" "$HOME/meshscope/env/bin/meshscope" ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""
CURL = """#!/bin/bash
[ "$1 $2 $3 $4" = "--silent --fail --header Metadata-Flavor: Google" ] || exit 9
case "$5" in
  http://metadata.google.internal/*/attributes/worker-network-endpoints) echo "$ENDPOINTS" ;;
  http://metadata.google.internal/*/attributes/agent-worker-number) echo "$WORKER" ;;
  *) exit 22 ;;
esac
"""
GCSFUSE = """#!/bin/bash
[ "$1 $2 $3" = "--implicit-dirs -o ro" ] && [ -d "$CLOUD/buckets/$4" ] && cp -r "$CLOUD/buckets/$4/." "$5"
"""
MESHSCOPE = """#!{python}
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
words = sys.argv[1:]
if words != ["--version"]:
    Path({home!r}, "executed").open("a").write(" ".join(words) + "\\n")
Path(Path.home(), "called").open("a").write(" ".join(words) + "\\n")
if words == ["--version"]:
    sys.exit()
assert words[0] == "run", words
value = lambda name, default=None: words[words.index(name) + 1] if name in words else default
batch = int(value("--batch", 1))
if batch == 7:
    sys.exit("meshscope: there is no such chip")
if batch == 9:
    time.sleep(20)
if batch == 5:
    time.sleep(1.5)
if "--checkpoint" in words:
    assert Path(value("--checkpoint"), "config.json").is_file(), "no checkpoint"
if "--process-id" in words and value("--process-id") != "0":
    sys.exit()
out = Path(value("--out"))
made = Path({kept!r}, "-".join([words[1], value("--topology"), value("--plan"), str(batch)]).replace("/", "-"))
if not made.exists():
    sys.path.insert(0, {source!r})
    from dataclasses import replace
    import meshscope
    from meshscope.events.enums import Source
    from meshscope.store.read import read_run
    from meshscope.store.write import write_run
    meshscope.predict(words[1], topology=value("--topology"), plan=value("--plan"), batch=batch, out="p", force=True)
    run = read_run(Path("p"))
    partial = Path(tempfile.mkdtemp(dir=made.parent))
    write_run(partial, replace(run, manifest=replace(run.manifest, source=Source.MEASURED)), metrics={{}})
    with suppress(OSError):  # another worker was faster
        partial.rename(made)
shutil.copytree(made, out)
"""


@dataclass(frozen=True)
class Cloud:
    """The folder of a stand-in cloud."""

    path: Path

    def set(self, **changes: Any) -> None:
        self.path.joinpath("cloud.json").write_text(json.dumps({**self.state, **changes}))

    @property
    def state(self) -> Mapping[str, Any]:
        return json.loads(self.path.joinpath("cloud.json").read_text())

    @property
    def calls(self) -> list[list[str]]:
        """The words of every gcloud command."""
        file = self.path / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def calls_of(self, *words: str) -> list[list[str]]:
        return [call for call in self.calls if " ".join(words) in " ".join(call)]

    def n_executed(self, batch: int) -> int:
        """How often meshscope was started on a worker for this batch, on any slice."""
        file = self.path / "executed"
        lines = file.read_text().splitlines() if file.exists() else []
        return sum(f"--batch {batch} " in line for line in lines)

    def called(self, worker: int) -> list[str]:
        """The commands of meshscope on a worker."""
        return self.path.joinpath("workers", str(worker), "called").read_text().splitlines()


@pytest.fixture
def cloud(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Generator[Cloud]:
    home = tmp_path / "cloud"
    (home / "bin").mkdir(parents=True)
    kept = tmp_path_factory.getbasetemp() / "measured"
    kept.mkdir(exist_ok=True)
    places = {"source": str(Path(__file__).parents[3] / "src"), "kept": str(kept)}
    tools = {
        "gcloud": f'#!/bin/bash\nexec {sys.executable} {STAND_IN} "$@"\n',
        "python3": PYTHON3,
        "curl": CURL,
        "gcsfuse": GCSFUSE,
        "meshscope": MESHSCOPE.format(python=sys.executable, home=str(home), **places),
    }
    for name, text in tools.items():
        (home / "bin" / name).write_text(text)
        (home / "bin" / name).chmod(0o755)
    made = Cloud(home)
    home.joinpath("cloud.json").write_text("{}")
    made.set(
        resources={}, nodes=[], polls=2, deleting=0, faults=[], workers=1, endpoints="a:b:10.0.0.2"
    )
    monkeypatch.setenv("CLOUD", str(home))
    monkeypatch.setenv("PATH", f"{home / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr("meshscope.backends.sweep.machine.POLL_S", 0.0)
    monkeypatch.setattr("meshscope.backends.sweep.machine.ASK_S", 1)
    yield made
    for file in home.glob("workers/*/meshscope/jobs/*/*/pid"):  # no run outlives its test
        with suppress(ProcessLookupError, ValueError):
            os.killpg(int(file.read_text()), signal.SIGKILL)
