"""`predict`, `show`, `compare`, `report` and `export`: what sessions.yaml cannot say."""

import json
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import made_kineto
import pytest
from tables import stored, table
from tests.cli.conftest import words_of

from meshscope import open as open_runs
from meshscope.cli import COMMANDS
from meshscope.reports.tables import MAX_LINES


@table
def test_the_answer_is_short_and_first(meshscope, ask: tuple[str, ...]) -> None:
    out = meshscope("predict", *ask).out
    answer = out.partition("\n\n")[0].splitlines()
    assert len(answer) <= MAX_LINES
    assert max(map(len, out.splitlines())) <= 80
    labels = [line.split("  ")[0] for line in answer]
    first = labels.index("TTFT, prefill")
    assert labels[first : first + 4] == ["TTFT, prefill", "TPOT, decode", "throughput", "fits"]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@table
def test_an_answer_has_twelve_lines_with_its_basis(meshscope, line: str) -> None:
    """Whatever there is to say of models, plans and sides; more comes with --full and --rows, after an empty line."""
    outcome = meshscope(*words_of(line))
    assert outcome.status in (0, 1)
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [one for one in lines if one.startswith("basis")] != []
    if {"--full", "--rows"} & set(line.split()):
        lines = [*lines, ""][: lines.index("") if "" in lines else None]
    assert 1 <= len(lines) <= MAX_LINES


# What has no figures, and what its output is instead.
WITHOUT_FIGURES = {
    **dict.fromkeys(("explore", "report", "export", "skill install"), "the file that it wrote"),
    "mcp": "a protocol",
    "sql": "the rows that were asked for",
    **{name: "what is installed, or was" for name in COMMANDS if name.startswith(("engines ", "compilers "))},
    **{name: "what gcloud says" for name in COMMANDS if name.startswith("tpu ")},
}  # fmt: skip
# They compile or measure, and print as predict does, or a list of as many lines; or they read files, in the next test.
OTHERS = {"compile", "run", "flags", "calibrate", "sweep", "check", "import"}


def test_every_command_with_figures_is_among_the_answers() -> None:
    asked = stored(Path(__file__).with_suffix(".yaml"))[
        "test_an_answer_has_twelve_lines_with_its_basis"
    ]
    named = {line.split()[0] for (line,) in asked[1:]}
    assert named | OTHERS | set(WITHOUT_FIGURES) == set(COMMANDS)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_lists_and_traces_have_the_first_block_too(meshscope) -> None:
    """Thirteen runs, a sweep of them, failed limits, and a trace with many findings."""
    grid = {"plan": ["tp=8", "dp=2,tp=4", "dp=4,tp=2", "dp=8"], "batch": [8, 16, 32]}
    defaults = {"model": "Qwen/Qwen3-4B", "topology": "v6e-8", "layers": 1}
    Path("s.yaml").write_text(json.dumps({"defaults": defaults, "grid": grid}))
    limits = [f'[[program.budget]]\naxis = "tp"\ncount = {n}\n' for n in range(4)]
    program = (
        '[[program]]\nmodel = "Qwen/Qwen3-4B"\ntopology = "v6e-8"\nplan = "tp=8"\npredict = true\n'
    )
    Path("budget.toml").write_text(program + "".join(limits))
    names = [f"allreduce_kernel_of_a_library_{n}" for n in range(20)]
    kernels = [made_kineto.kernel(f"ncclKernel_{name}", n, 1) for n, name in enumerate(names)]
    made_kineto.write(Path("t.json"), made_kineto.document(kernels, world_size=8))
    lines = (
        *("sweep s.yaml --dry-run", "sweep s.yaml", "show runs/s", "check budget.toml"),
        "import t.json --mesh dp=8 --out t",
    )
    for line in lines:
        outcome = meshscope(*words_of(line))
        shown = outcome.out.splitlines()
        assert outcome.status in (0, 1)
        assert 2 <= len(shown) <= MAX_LINES, line
        assert "--full adds" in shown[-1], line
        if "--dry-run" not in line:
            assert any(one.startswith("basis") for one in shown), line


@pytest.mark.slow
def test_times_without_an_interval_say_why_in_text_json_plan_and_report(meshscope) -> None:
    reason = "no published times of collectives on h100 give the error of the model"
    ask = words_of("predict Qwen/Qwen3-4B --topology h100:2 --plan tp=2 --out gpu")
    out = " ".join(meshscope(*ask).out.split())
    assert out.count("(no interval)") == 2
    assert out.count(f"predicted times have no interval: {reason}") == 1
    assert "unknown: at least 3.76 of 74.51 GiB without temporaries, room for at most" in out
    assert json.loads(meshscope("show", "gpu", "--json").out)["time"]["no_interval"] == reason
    meshscope("report", "gpu", "--out", "page.html")
    page = Path("page.html").read_text()
    assert (page.count(reason), page.count("no interval; predicted")) == (1, 2)
    plan = words_of("plan Qwen/Qwen3-4B --topology h100:2 --batch 2")
    assert f"times have no interval: {reason}" in " ".join(meshscope(*plan, "--full").out.split())
    assert json.loads(meshscope(*plan, "--json").out)["no_interval"] == reason
    known = words_of("predict Qwen/Qwen3-4B --topology v6e-4 --plan tp=4 --json")
    assert json.loads(meshscope(*known).out)["time"]["no_interval"] is None


@pytest.mark.usefixtures("here")
def test_python_has_the_throughput_of_json(meshscope) -> None:
    document = json.loads(meshscope("show", "a", "--json").out)
    throughput = open_runs("a").throughput
    assert asdict(throughput) == document["throughput"]
    assert throughput.decode_tokens_per_s == pytest.approx(2 / document["time"]["decode_step_s"])


@pytest.mark.usefixtures("here")
def test_sequence_parallelism_is_told_as_changed_and_extra(meshscope) -> None:
    """Each all-reduce of prefill becomes a reduce-scatter, and an all-gather is added.

    It sends as many bytes for a layer, in twice the collectives.
    """
    document = json.loads(meshscope("compare", "a", "b", "--json").out)
    prefill = [
        (row["verdict"], row["right"]["part"], row["layers"], row["note"])
        for row in document["rows"]
        if (row["right"] or row["left"])["phase"] == "prefill" and row["verdict"] != "equal"
    ]
    changed = "all_reduce -> reduce_scatter"
    expected = {"changed": changed, "extra": None}
    for part in ("attn", "mlp"):
        for verdict, note in expected.items():
            assert (verdict, part, [0, 1, 2], note) in prefill
    side = {"source": "predicted", "other_operations": []}
    assert document["left"] == {"name": "A", "run": "a", **side}
    assert document["verdict"] == "different"
    explanation = document["explanation"]
    places = {(p["axis"], p["part"]): p for p in explanation["phases"]["prefill"]["places"]}
    assert places["tp", "mlp"]["right"]["kinds"] == {"all_gather": 3, "reduce_scatter": 3}
    assert places["tp", "mlp"]["wire_bytes_change"] == 0
    assert explanation["sentences"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_its_options(meshscope, name: str) -> None:
    status, out, err = meshscope(*name.split(), "--help")
    assert (status, err) == (0, "")
    assert f"Usage: meshscope {name} " in out
    words = " ".join(out.split())
    assert COMMANDS[name].summary in words
    assert [line for line in out.splitlines() if line.startswith("  -h, --help ")] != []
    assert "--as-json" not in out


@pytest.mark.parametrize("option", ["--rows", "--json"])
def test_full_of_a_whole_answer_is_the_answer_with_a_note(meshscope, option: str) -> None:
    ask = words_of("predict Qwen/Qwen3-4B --topology v6e-4 --plan tp=4")
    whole, full = meshscope(*ask, option), meshscope(*ask, option, "--full")
    assert (full.status, full.out) == (0, whole.out)
    assert "--full adds nothing to this output, which is whole" in full.err


def test_a_pipeline_has_rows_by_stage(meshscope) -> None:
    """32 layers on two stages; a device sends in each of 4 + 2 - 1 ticks."""
    ask = words_of(
        "predict Llama-3.1-8B --topology v6e-8 --plan pp=2,tp=4 --batch 8 --microbatches 4"
    )
    document = json.loads(meshscope(*ask, "--json").out)
    text, full = (meshscope(*ask, *options).out for options in (("--rows",), ("--full",)))
    prefill = [row for row in document["collectives"] if row["phase"] == "prefill"]
    stages = [(row["stage"], row["part"], row["layers"][:1], row["count"]) for row in prefill]
    assert stages == [
        (0, "embed", [], 4),
        (0, "attn", [0], 4 * 16),
        (0, "mlp", [0], 4 * 16),
        (0, "stage", [], 5),
        (1, "attn", [16], 4 * 16),
        (1, "mlp", [16], 4 * 16),
        (1, "lm_head", [], 1),
        (None, "sample", [], 1),
    ]
    assert document["totals"]["prefill"]["count"] == sum(row["count"] for row in prefill)
    assert document["experiment"]["microbatches"] == {"prefill": 4, "decode": 1}
    assert "; 4 micro-batches in prefill" in " ".join(full.split())
    assert "stage" in next(line for line in text.splitlines() if line.startswith("collective"))


@pytest.mark.slow
def test_a_report_of_the_largest_model_stays_small(meshscope) -> None:
    """At most 3 MB with what the compiler tells."""
    line = "predict deepseek-ai/DeepSeek-V3.1-Base --topology v6e:8x8 --plan dp=8,tp=8,ep=64"
    assert meshscope(*words_of(f"{line} --batch 64 --prompt 1024 --out one")).status == 0
    document = json.loads(meshscope("report", "one", "--json").out)
    charts = len(resources.files("meshscope.reports.html").joinpath("vega.js").read_bytes())
    assert 50_000 < document["file_bytes"] - charts < 1_000_000


@pytest.mark.slow
def test_several_runs_are_reported_in_their_folder(meshscope, here: Path) -> None:
    Path("sweep").mkdir()
    for name in "ab":
        (here / name).rename(here / "sweep" / name)
    Path("sweep/summary.parquet").write_bytes(b"PAR1")
    for paths in (("sweep",), ("sweep/*",), ("sweep/a", "sweep/b", "sweep/summary.parquet")):
        status, out, err = meshscope("report", *paths, "--json", "--force")
        document = json.loads(out)
        assert (document["path"], status) == ("sweep/report.html", 0)
        assert document["runs"] == ["sweep/a", "sweep/b"]
        is_named = "sweep/summary.parquet" in paths
        assert ("skipped sweep/summary.parquet: not a run" in err) is is_named
    assert document["file_bytes"] == Path("sweep/report.html").stat().st_size


@pytest.mark.usefixtures("here")
def test_open_is_a_flag_and_opens_the_file(meshscope, monkeypatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert meshscope("report", "a", "--open", "--out", "x.html").status == 0
    assert opened == [Path("x.html").resolve().as_uri()]


@pytest.mark.usefixtures("here")
def test_too_many_runs_are_refused(meshscope) -> None:
    status, _, err = meshscope("report", *["a"] * 201, "--out", "x.html")
    assert (status, "at most 200" in err) == (1, True)


def test_runs_of_a_folder_are_one_timeline(meshscope, here: Path) -> None:
    Path("runs").mkdir()
    for name in ("a", "b"):
        (here / name).rename(Path("runs", name))
    status, out, err = meshscope("export", "runs", "--to", "chrome", "--out", "all.json")
    assert (status, out) == (0, "")
    assert err.startswith("wrote all.json (2 runs")
    events = json.loads(Path("all.json").read_text())["traceEvents"]
    runs = {
        e["pid"]: e["args"]["name"].partition(": ")[2]
        for e in events
        if e["name"] == "process_name"
    }
    assert len(set(runs.values())) == 2
    assert [name for _, name in sorted(runs.items())] == sorted(runs.values())
    flows: dict[int, set[str]] = {}
    for event in events:
        if event.get("cat") == "collective":
            flows.setdefault(event["id"], set()).add(runs[event["pid"]])
    assert {len(of_flow) for of_flow in flows.values()} == {1}
    status, _, err = meshscope("export", "runs", "--to", "xplane")
    assert (status, "Give the folder of a run" in err) == (1, True)


OUTPUTS = {
    "perfetto": "a.perfetto.json.gz",
    "chrome": "a.trace.json.gz",
    "card": "a.card.yaml",
    "csv": "a.csv",
    "parquet": "a.parquet",
    "chakra": "a-chakra",
    "ccl-bench": "a-tpu-ccl-bench",
}


@pytest.mark.parametrize(("form", "name"), OUTPUTS.items())
def test_every_form_is_written_once(meshscope, here: Path, form: str, name: str) -> None:
    before, inside = {*here.iterdir()}, sorted(Path("a").rglob("*"))
    status, out, err = meshscope("export", "a", "--to", form)
    assert (status, out) == (0, "")
    assert err.startswith(f"wrote {name}")
    status, _, err = meshscope("export", "a", "--to", form)
    assert (status, "--force" in err) == (1, True)
    assert meshscope("export", "a", "--to", form, "--force").status == 0
    assert sorted(Path("a").rglob("*")) == inside
    assert {*here.iterdir()} - before == {here / name}
