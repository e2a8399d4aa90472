"""MaxText's training step: what it sends, by its stored text, and what is refused."""

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import meshscope
from meshscope.api import compile as api
from meshscope.backends.compile import compile as backend
from meshscope.errors import PlanError, SpecError
from meshscope.events.enums import Kind, Part, Phase
from meshscope.programs.environments import release_of

GOLDEN = Path(__file__).parents[1] / "golden" / "maxtext_training"
OPTIONS: dict[str, Any] = {
    "topology": "v6e-8",
    "plan": "fsdp=8",
    "layers": 2,
    "batch": 8,
    "prompt": 2048,
    "frontend": "maxtext",
    "training": True,
}
LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> meshscope.Run:
    """The run of the stored program."""

    def copied(programs: Sequence[Any], *_: Any) -> None:
        for path in GOLDEN.iterdir():
            shutil.copy(path, programs[0].folder)

    monkeypatch.setattr(backend, "_run_workers", copied)
    monkeypatch.setattr(api, "check_can_compile_training", lambda _: None)
    monkeypatch.setattr(
        "meshscope.api.compile.installed_release", lambda *_: release_of("maxtext", None)
    )
    return meshscope.compile(LLAMA, **OPTIONS, out=tmp_path / "run")


def test_weights_are_gathered_twice_and_gradients_scattered(stored: meshscope.Run) -> None:
    """Forward and backward gather each of the seven matrices of a layer: `remat_policy` is full."""
    counts: Counter[tuple[Kind, Part | None]] = Counter()
    for row in stored.record.rows:
        if row.dtype == "bf16" and row.payload_bytes and row.payload_bytes > 2**20:
            counts[row.kind, row.part] += row.count
    gathers = [counts[Kind.ALL_GATHER, part] for part in (Part.ATTN, Part.MLP)]
    scatters = [counts[Kind.REDUCE_SCATTER, part] for part in (Part.ATTN, Part.MLP)]
    assert scatters == [2 * 4, 2 * 3]
    assert gathers == [2 * scatters[0], 2 * scatters[1]]
    assert counts[Kind.REDUCE_SCATTER, Part.LM_HEAD] == 1


def test_rows_have_axis_and_part_and_no_layer(stored: meshscope.Run) -> None:
    rows = stored.record.rows
    assert {(row.phase, row.axis, row.layer) for row in rows} == {(Phase.STEP, "fsdp", None)}
    assert all(row.part is not None for row in rows)
    assert stored.as_dict()["unattributed"]["count"] == 0


def test_a_training_step_has_time_and_memory(stored: meshscope.Run) -> None:
    (time,) = stored.record.times
    memory = stored.as_dict()["memory"]
    assert time.phase is Phase.STEP
    assert time.step.value_s == pytest.approx(0.073, rel=0.1)
    assert memory["fits"] is True
    # Weights, and both moments of Adam, in float32: 3 x 4 bytes of 1.49 G parameters over 8 devices.
    assert memory["argument_bytes"] == pytest.approx(3 * 4 * 1.487e9 / 8, rel=0.01)


def test_the_report_shows_the_memory_of_a_step(stored: meshscope.Run, tmp_path: Path) -> None:
    page = stored.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "arguments 2.08 GiB" in page


def test_the_stored_text_is_of_maxtexts_own_step() -> None:
    text = gzip.decompress((GOLDEN / "step.hlo.txt.gz").read_bytes()).decode()
    report = json.loads((GOLDEN / "step.json").read_text(encoding="utf-8"))
    assert text.startswith("HloModule jit_train_step")
    assert report["versions"]["maxtext"] == "0.2.5"


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"frontend": "jax"},
            SpecError,
            "training=True compiles the training step of MaxText, not",
        ),
        ({"plan": "tp=8", "output": 7}, SpecError, "output=7 changes nothing: a training step"),
        ({"plan": "pp=2,tp=4"}, PlanError, "training=True takes tp, fsdp, dp, not pp. Use fsdp=8"),
        ({"engine_version": "9.9"}, SpecError, "no such known release. Use one of 0.2.5"),
    ],
)
def test_what_a_training_step_does_not_take_is_refused(
    options, kind, message, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if "engine_version" not in options:
        monkeypatch.setattr(
            "meshscope.api.compile.installed_release", lambda *_: release_of("maxtext", None)
        )
    with pytest.raises(kind, match=message):
        meshscope.compile(LLAMA, **(OPTIONS | options), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
