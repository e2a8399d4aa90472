"""The public API is frozen, and the examples of its page run."""

import inspect
import re
import sys
from base64 import b64decode
from collections.abc import Callable
from dataclasses import FrozenInstanceError, is_dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from tables import table

import meshscope
from meshscope.errors import RunError, SpecError

SMALL_HLO = (Path(__file__).parent / "data" / "one_all_reduce.hlo.txt").read_text()
QWEN = {"model": "Qwen/Qwen3-4B", "topology": "v6e-8", "plan": "tp=8"}
SHORT = QWEN | {"layers": 1}
PAGE = Path(__file__).parents[2] / "docs" / "api.md"
GOLDEN = Path(__file__).parents[1] / "golden" / "api.txt"
# Examples that need the TPU compiler are marked `py`, the others `python`.
EXAMPLES = re.findall(r"```(python|py)\n(.*?)```", PAGE.read_text(), re.DOTALL)


def public_api() -> str:
    """Every public name with its signature, classes with their public members."""
    return "".join(f"{line}\n" for name in meshscope.__all__ for line in _lines(name))


def _lines(name: str) -> list[str]:
    value = getattr(meshscope, name)
    if not inspect.isclass(value):
        return [f"{name}{_signature(value)}" if callable(value) else name]
    members = sorted(n for n in vars(value) if not n.startswith("_"))
    return [f"class {name}", *(f"  {_member(n, vars(value)[n])}" for n in members)]


def _member(name: str, value: object) -> str:
    return f"{name}{_signature(value)}" if inspect.isfunction(value) else name


def _signature(function: Callable[..., object]) -> str:
    """As `help` shows it, without the modules of the types: the same for every version of Python."""
    signature = inspect.signature(function)
    parameters = [
        one if one.default is inspect.Parameter.empty else one.replace(default=_Named(one.default))
        for one in signature.parameters.values()
    ]
    return re.sub(r"\b[a-zA-Z_]\w*\.(?=\w)", "", str(signature.replace(parameters=parameters)))


class _Named:
    """A default by its name."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value.value if isinstance(self.value, Enum) else self.value)


def test_the_public_api_is_frozen() -> None:
    """A change of tests/golden/api.txt is a change of the contract with users."""
    assert public_api() == GOLDEN.read_text()


def test_the_page_names_every_public_function() -> None:
    functions = [n for n in meshscope.__all__ if inspect.isfunction(getattr(meshscope, n))]
    assert [n for n in functions if f"`{n}(" not in PAGE.read_text()] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "mark",
    ["python", pytest.param("py", marks=pytest.mark.tpu)],
    ids=["predict", "tpu"],
)
def test_the_examples_of_the_page_run(mark, tmp_path, monkeypatch, capsys) -> None:
    if mark == "py":
        pytest.importorskip("libtpu", reason="needs the extra tpu")
    monkeypatch.chdir(tmp_path)
    for kind, example in EXAMPLES:
        if kind == mark:
            exec(compile(example, str(PAGE), "exec"), {})
    out, err = capsys.readouterr()
    assert err == ""
    if mark == "py":
        lines = out.splitlines()
        verdicts = [line for line in lines if line.startswith("collectives: predicted = compiled")]
        # Equal collectives, whether or not the times of this one layer agree.
        assert [verdict.split(";")[0] for verdict in verdicts] == [
            "collectives: predicted = compiled"
        ]
        assert lines[-1] == "equal"
        return
    assert "<Run predicted: Qwen/Qwen3-32B, tp=8, v6e:2x4, TTFT " in out
    assert "tp=3" in out.splitlines()[-1]
    assert Path("report.html").is_file()


def test_the_command_of_a_run_is_that_of_the_command_line(tmp_path: Path) -> None:
    meshscope.predict(**SHORT, kernels="off", out=tmp_path / "a")
    words = f"meshscope predict Qwen/Qwen3-4B --topology v6e-8 --plan tp=8 --layers 1 --kernels off --out {tmp_path / 'a'}"
    assert meshscope.open(tmp_path / "a")[0].record.manifest.command == tuple(words.split())


@table
def test_a_wrong_option_is_one_message(options: dict[str, object], message: str) -> None:
    with pytest.raises(meshscope.MeshscopeError, match=re.escape(message)):
        meshscope.predict(**QWEN | options)


def test_a_set_of_several_runs_has_no_time_and_a_run_is_copied_whole(tmp_path: Path) -> None:
    run = meshscope.predict(**SHORT, out=tmp_path / "a")
    copy = run.save(tmp_path / "b")
    assert copy.as_dict() | {"run": None} == run.as_dict() | {"run": None}
    with pytest.raises(
        meshscope.MeshscopeError, match="Use force=True to replace it, or another path="
    ):
        run.save(tmp_path / "b")
    with pytest.raises(meshscope.MeshscopeError, match=r"2 runs are open\. Choose one"):
        _ = meshscope.open(tmp_path).time
    assert meshscope.open(tmp_path / "a").time == meshscope.open(tmp_path)[1].time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"batch": np.int64(8)}, {"batch": 8}),
        ({"batch": np.uint8(8), "layers": np.int32(2)}, {"batch": 8, "layers": 2}),
        ({"prompt": pl.Series([256])[0], "output": np.array(64)}, {"prompt": 256, "output": 64}),
        ({"prefill_chunk": np.int64(64)}, {"prefill_chunk": 64}),
    ],
)
def test_numbers_of_other_libraries_are_numbers(options, plain) -> None:
    got, wanted = meshscope.predict(**QWEN | options), meshscope.predict(**QWEN | plain)
    assert got.time == wanted.time
    assert got.as_dict()["experiment"] == wanted.as_dict()["experiment"]


@pytest.mark.slow
def test_the_times_of_a_run_have_the_intervals_of_its_document() -> None:
    run = meshscope.predict(**QWEN)
    stored = run.as_dict()["time"]
    assert {n: list(run.time.intervals[n]) for n in stored["intervals"]} == stored["intervals"]
    assert set(run.time.intervals) == {"prefill_s", "decode_step_s", "ttft_s", "tpot_s", "e2e_s"}
    for name, (low_s, high_s) in run.time.intervals.items():
        assert low_s <= getattr(run.time, name) <= high_s


def test_a_run_in_memory_answers_sql() -> None:
    run = meshscope.predict(**SHORT)
    assert run.sql("select count(*) as n from collectives")["n"].item() == len(run.collectives)
    with pytest.raises(meshscope.MeshscopeError, match=r"Views: events, collectives, runs"):
        run.sql("select * from rows")


@pytest.mark.slow
@table
def test_messages_in_python_name_arguments(function, options, message) -> None:
    with pytest.raises(meshscope.MeshscopeError) as caught:
        getattr(meshscope, function)(**{**QWEN, **options})
    assert message in str(caught.value)
    assert " --" not in f" {caught.value}"


def test_a_whole_command_in_a_message_keeps_its_options() -> None:
    with pytest.raises(meshscope.MeshscopeError, match="with 'meshscope calibrate --out /none'"):
        meshscope.predict(**QWEN, profile="/none")


@pytest.mark.slow
def test_numbers_of_numpy_are_taken_by_every_function(tmp_path: Path) -> None:
    text = tmp_path / "f.txt"
    text.write_text(SMALL_HLO)
    options = {"topology": "v6e-8", "plan": "tp=8", "out": tmp_path / "run"}
    assert meshscope.import_(text, **options, force=np.bool_(True)).collectives.height == 1
    served = meshscope.serve_sim(**QWEN, rate=np.float32(2), requests=np.int64(20))
    assert served.request.rates == (2.0,)
    best = meshscope.plan("Qwen/Qwen3-4B", topology="v6e-8", batch=np.int64(8), layers=np.int64(1))
    assert best.winner.experiment.workload.batch == 8
    for value in (np.True_, np.float64(8)):
        message = re.escape(f"batch: {value!r} must be a")
        with pytest.raises(meshscope.MeshscopeError, match=message):
            meshscope.predict(**QWEN | {"batch": value})
    with pytest.raises(meshscope.MeshscopeError, match=r"layers: .*4\.5\)? must be a whole number"):
        meshscope.import_(text, **options, layers=np.float64(4.5))
    with pytest.raises(meshscope.MeshscopeError, match=r"instances=0 is too small\. Use 1 or more"):
        meshscope.serve_sim(**QWEN, rate=1.0, instances=np.int64(0))
    with pytest.raises(meshscope.MeshscopeError, match='rate="x" is neither a number'):
        meshscope.serve_sim(**QWEN, rate="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["time", "tme", "record"])
def test_a_run_is_not_changed_in_place(name: str) -> None:
    run = meshscope.predict(**SHORT)
    with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
        setattr(run, name, 5)
    with pytest.raises(FrozenInstanceError, match=f"cannot delete field '{name}'"):
        delattr(run, name)


@pytest.mark.slow
def test_an_unknown_field_of_a_result_names_the_known_ones(tmp_path: Path) -> None:
    run = meshscope.predict(**SHORT)
    run.save(tmp_path / "run")
    best = meshscope.plan("Qwen/Qwen3-4B", topology="v6e-8", batch=8, layers=1)
    served = meshscope.serve_sim(**QWEN, rate=1, requests=20, layers=1)
    results = [
        *(run, run.time, run.memory, run.capacity, run.throughput, run.experiment, run.record),
        *(meshscope.compare(run, run), meshscope.compare(run, run).comparison, run.metrics()),
        *(meshscope.open(tmp_path / "run"), best, best.search, best.winner, served, served.outcome),
    ]
    for result in results:
        kind = type(result).__name__
        some = next(name for name in dir(result) if not name.startswith("_"))
        with pytest.raises(AttributeError, match=f"'{kind}' has no field 'foo'. Known: {some}, "):
            _ = result.foo  # type: ignore[union-attr]
        if is_dataclass(result):
            with pytest.raises(FrozenInstanceError, match="cannot assign to field 'foo'"):
                result.foo = 5  # type: ignore[union-attr]


@pytest.mark.parametrize("read", [meshscope.open, meshscope.compare, meshscope.check])
@pytest.mark.parametrize("path", ["", "a\0b", 5])
def test_what_is_no_path_is_refused(read: Callable[[object], object], path: object) -> None:
    with pytest.raises(meshscope.MeshscopeError, match="is not a path"):
        read(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs in a folder, and what is none beside them."""
    for name in ("a", "b"):
        asked = {"topology": "v6e-4", "plan": "tp=4", "layers": 1, "out": tmp_path / "runs" / name}
        meshscope.predict("Qwen/Qwen3-4B", **asked)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("")
    return tmp_path / "runs"


def test_a_run_a_folder_and_a_pattern_are_found(folder: Path) -> None:
    assert len(meshscope.open(str(folder / "a"))) == 1
    for pattern in (folder, folder / "*", folder / "[ab]"):
        assert [path.name for path in meshscope.open(str(pattern)).folders] == ["a", "b"]


@pytest.mark.parametrize("pattern", ["none", "runs/x*", "runs/notes"])
def test_no_run_is_one_message(folder: Path, monkeypatch, pattern: str) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(RunError, match="Give the folder of a run"):
        meshscope.open(pattern)


def test_tables_have_the_rows_of_all_runs(folder: Path) -> None:
    runs = meshscope.open(str(folder))
    each = len(pl.read_parquet(folder / "a" / "events.parquet"))
    assert runs.events["run"].to_list() == ["a"] * each + ["b"] * each
    assert runs.table["run"].to_list() == ["a", "b"]
    assert runs.timeline.is_empty()
    counts = runs.sql("select run, sum(count) as n from collectives group by run order by run")
    assert counts.rows() == [("a", 8), ("b", 8)]
    assert [run.path for run in runs] == list(runs.folders)


def test_metrics_of_all_runs_stand_together(folder: Path) -> None:
    metrics = meshscope.open(str(folder)).metrics()
    assert metrics["volume"]["run"].unique(maintain_order=True).to_list() == ["a", "b"]
    assert metrics.unknown.filter(metric="latency")["run"].to_list() == ["a", "b"]
    with pytest.raises(
        SpecError, match="no run has the metric 'latency': only runs on live devices"
    ):
        metrics["latency"]
    with pytest.raises(SpecError, match="Did you mean 'volume'"):
        metrics["volumes"]


@pytest.mark.slow
def test_a_query_only_reads(folder: Path) -> None:
    runs = meshscope.open(str(folder))
    for query in ("drop view collectives", "select * from '/etc/passwd'", "select 1; select 2"):
        with pytest.raises(SpecError, match="SQL"):
            runs.sql(query)


def test_a_notebook_shows_runs_and_metrics(folder: Path) -> None:
    runs = meshscope.open(str(folder))
    assert "shape: (2, " in runs._repr_html_()
    assert "Volume" in runs.metrics()._repr_html_()


@pytest.mark.slow
def test_a_notebook_shows_the_charts_of_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = meshscope.open(str(folder))[0]
    best = meshscope.plan("Qwen/Qwen3-4B", topology="v6e-4", batch=8)
    for one in (run, best):
        page = one._repr_html_()
        assert page.startswith("<pre>")
        pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)"', page)
        assert 1 <= len(pictures) <= 3
        for content, words in pictures:
            assert b64decode(content).startswith(b"<svg")
            assert len(words) > 20
    monkeypatch.setitem(sys.modules, "meshscope.reports.charts.pictures", None)
    assert "pip install &#x27;meshscope[plots]&#x27;" in run._repr_html_()


def test_a_run_is_shown_in_one_line(folder: Path) -> None:
    text = repr(meshscope.open(str(folder))[0])
    assert text.startswith("<Run predicted: ")
    assert (text.count("\n"), len(text) < 400) == (0, True)
