"""A run measured on a TPU becomes a contribution; others, and faulty captures, are refused."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from tables import table

import meshscope
from meshscope.analysis.samples import read_contributed
from meshscope.api.contribute import contribution_of
from meshscope.errors import MeshscopeError, ParseError, RunError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import DeviceLoad, Measured, Request
from meshscope.hardware.interconnect import collective_time, constants_of
from meshscope.store.run import RunRecord
from meshscope.store.write import write_run

ROOT = Path(__file__).parents[2]
N_DEVICES = 8
EFFICIENCY, LATENCY_S = 0.7, 9e-6  # of the chip that is made up


def made_up_s(row: Collective, record: RunRecord) -> float:
    """The time of a chip with other constants."""
    topology = record.manifest.experiment.topology
    assert row.payload_bytes is not None
    constants = constants_of(topology.chip)
    rates = replace(constants.rates, latency_s=LATENCY_S, efficiency=EFFICIENCY)
    return collective_time(
        row.kind,
        groups=row.groups,
        payload_bytes=row.payload_bytes,
        topology=topology,
        constants=replace(constants, rates=rates, by_kind=()),
    ).seconds


def measured_record(topology: str = "v6e-8", plan: str = "dp=2,tp=4,sp") -> RunRecord:
    run = meshscope.predict(
        "Qwen/Qwen3-4B", topology=topology, plan=plan, batch=8, prompt=1024, output=8
    ).record
    rows = tuple(
        replace(row, source=Source.MEASURED, dur_s=made_up_s(row, run), is_async=False)
        for row in run.rows
    )
    loads = tuple(
        DeviceLoad(
            phase=Phase.DECODE, device=i, busy_s=1, collective_s=0.1, wait_s=None, idle_s=0, window_s=1
        )
        for i in range(N_DEVICES)
    )  # fmt: skip
    measured = Measured(
        requests=(Request(prefill_s=0.5, decode_s=(0.01,) * 7),) * 3,
        n_profiled_steps={Phase.PREFILL: 3, Phase.DECODE: 21},
        loads=loads,
        times=(),
        findings=(),
    )
    manifest = replace(
        run.manifest,
        source=Source.MEASURED,
        command=("meshscope", "run", "/home/someone/secret"),
        versions={"jax": "0.10.2", "libtpu": "0.0.42.1"},
    )
    return replace(run, manifest=manifest, rows=(*run.rows, *rows), measured=measured)


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[RunRecord], Path]:
    def written(record: RunRecord) -> Path:
        path = tmp_path / "measured"
        path.mkdir()
        write_run(path, record, metrics={})
        return path

    return written


def test_a_measured_run_says_what_it_would_change(folder_of) -> None:
    contribution = contribution_of(folder_of(measured_record()))
    assert {p.kind.value for p in contribution.run.points} == {
        "all_gather",
        "all_reduce",
        "reduce_scatter",
    }
    assert contribution.refit.error_after_frac < contribution.refit.error_before_frac
    assert contribution.refit.error_after_frac < 0.05
    assert [step.phase for step in contribution.run.steps] == [Phase.PREFILL, Phase.DECODE]
    assert contribution.run.steps[0].seconds == 0.5


def test_the_files_have_conditions_and_times_but_no_paths(folder_of, tmp_path, capsys, monkeypatch) -> None:  # fmt: skip
    path = folder_of(measured_record())
    status, out, _ = run_command(
        path, "--out", "clone", capsys=capsys, monkeypatch=monkeypatch, home=tmp_path
    )
    assert status == 0
    (data,) = (tmp_path / "clone" / "tools" / "contributed").glob("*.json")
    (description,) = (tmp_path / "clone").glob("contribution-*.md")
    assert description.read_text() == out
    assert "libtpu 0.0.42.1" in out
    assert "secret" not in data.read_text() + out
    assert read_contributed(data) == contribution_of(path).run

    status, _, err = run_command(
        path, "--out", "clone", capsys=capsys, monkeypatch=monkeypatch, home=tmp_path
    )
    assert status == 1
    assert "--force" in err


def run_command(path, *words, capsys, monkeypatch, home) -> tuple[int, str, str]:
    from meshscope.cli import main  # noqa: PLC0415

    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "argv", ["meshscope", "contribute", str(path), *words])
    status = 0
    try:
        main()
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


def test_a_contributed_run_enters_the_fit(folder_of, tmp_path, monkeypatch) -> None:
    """The fit of all points takes those of `tools/contributed`, too."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    published = import_module("published_collectives")
    contribution = contribution_of(folder_of(measured_record()))
    file = tmp_path / "one.json"
    file.write_text(meshscope_text(contribution.run))
    points = published.contributed_points(tmp_path)
    assert [point.seconds for point in points] == [
        point.seconds for point in contribution.run.points
    ]
    assert [point.groups for point in points] == [
        contribution.run.groups(p) for p in contribution.run.points
    ]

    fit = import_module("fit_collectives")
    v6e = constants_of(contribution.run.slice.chip)
    fitted = tuple(published.split_points((*published.POINTS, *points))[0])
    refitted = fit._fit(contribution.run.slice.chip, fitted)
    assert refitted.rates.latency_s > v6e.rates.latency_s


def meshscope_text(run) -> str:
    from meshscope.analysis.samples import contributed_text  # noqa: PLC0415

    return contributed_text(run)


def test_points_that_cannot_be_are_left_out(folder_of) -> None:
    record = measured_record()
    rows = [row for row in record.rows if row.source is Source.MEASURED]
    faster = replace(rows[1], dur_s=1e-9)
    overlapped = replace(rows[-1], is_async=True)
    changed = replace(record, rows=(*record.rows_of(Source.PREDICTED), faster, overlapped))
    contribution = contribution_of(folder_of(changed))
    assert contribution.run.points == ()
    assert len(contribution.left_out) == 2
    assert contribution.refit is None
    assert "too few" in (contribution.no_refit or "")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"manifest": {"source": Source.PREDICTED}}, "meshscope run"),
        ({"measured": {"findings": ("3 events were lost",)}}, "--accept-findings"),
        ({"measured": {"n_profiled_steps": {Phase.DECODE: 1}}}, "fewer than 3"),
        ({"measured": {"loads": ()}, "manifest": {"versions": {}}}, "no version of libtpu"),
    ],
    ids=["predicted", "findings", "few-steps", "no-version"],
)
def test_what_is_no_good_measurement_is_refused(folder_of, change, remedy) -> None:
    record = measured_record()
    assert record.measured is not None
    changed = replace(
        record,
        manifest=replace(record.manifest, **change.get("manifest", {})),
        measured=replace(record.measured, **change.get("measured", {})),
    )
    with pytest.raises(RunError, match=remedy):
        contribution_of(folder_of(changed))


def test_accepted_findings_are_stated(folder_of) -> None:
    record = measured_record()
    assert record.measured is not None
    faulty = replace(record, measured=replace(record.measured, findings=("3 events were lost",)))
    contribution = contribution_of(folder_of(faulty), accept_findings=True)
    assert contribution.run.findings == ("3 events were lost",)


def test_a_run_on_a_cpu_is_refused(folder_of) -> None:
    with pytest.raises(RunError, match="TPU slice"):
        contribution_of(folder_of(cpu_record()))


def cpu_record() -> RunRecord:
    record = measured_record()
    experiment = replace(
        record.manifest.experiment,
        topology=meshscope.predict(
            "Qwen/Qwen3-4B", topology="h100:8", plan="tp=8"
        ).experiment.topology,
    )
    return replace(record, manifest=replace(record.manifest, experiment=experiment))


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "events"])
def test_a_broken_folder_is_one_message(folder_of, tmp_path, damage: str) -> None:
    path = folder_of(measured_record())
    if damage == "missing":
        path = tmp_path / "nothing"
    elif damage == "empty":
        path = tmp_path / "empty"
        path.mkdir()
    elif damage == "cut":
        manifest = path / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:100])
    else:
        (path / "events.parquet").write_bytes(b"PAR1" * 9)
    with pytest.raises(MeshscopeError):
        contribution_of(path)


@table
def test_a_hostile_data_file_is_refused(folder_of, tmp_path, change) -> None:
    run = contribution_of(folder_of(measured_record())).run
    document = json.loads(meshscope_text(run)) | change
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ParseError, match="contributed run"):
        read_contributed(file)
