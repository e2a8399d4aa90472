"""Chart data from small tables: sums, folded matrices, first devices, loops and layers."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from made import estimate, part_cost, step_time

from meshscope.analysis.catalog import MetricInputs, StepDuration
from meshscope.analysis.timeline import TIMELINE_SCHEMA
from meshscope.analysis.volume import link_traffic
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import DeviceLoad, Measured
from meshscope.events.schema import POLARS_SCHEMA
from meshscope.events.timeline import TIMELINE
from meshscope.hardware.topology import parse_topology
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.reports.charts.cost import cost_bars, segments_of
from meshscope.reports.charts.spec import Chart, look
from meshscope.reports.charts.timeline import step_charts
from meshscope.reports.charts.traffic import MAX_SIDE, matrix_chart, torus_chart

STEP = step_time(
    Phase.DECODE,
    estimate(10.0, 8.0, 12.0),
    4.0,
    exposed_s=3.0,
    idle_s=3.0,
    bubble_s=1.0,
    collective_s=5.0,
    exposed_by_axis_s={"tp": 2.0, "dp+tp": 1.0},
    parts=(part_cost("mlp", 4.0, flops=8e14, hbm_bytes=4e12),),
)


def _events(n_devices: int, kind: str = "all_reduce", **more: Any) -> pl.DataFrame:
    row = {
        "source": "compiled", "phase": "prefill", "kind": kind, "axis": "tp", "group_size": n_devices,
        "groups": [list(range(n_devices))], "payload_bytes": 800, "wire_bytes": 100.0, "count": 2,
        "n_steps": 1, **more,
    }  # fmt: skip
    return pl.DataFrame([row], schema=POLARS_SCHEMA)


def test_segments_sum_to_the_step_and_separate_waits_for_stages() -> None:
    segments = dict(segments_of(STEP))
    assert sum(segments.values()) == STEP.step.value_s
    waits = {"waiting for memory": 2.0, "waiting for stages": 1.0, "exposed over dp+tp": 1.0}
    assert waits.items() <= segments.items()


def test_a_measured_step_is_divided_like_the_profiled_steps() -> None:
    loads = tuple(
        DeviceLoad(phase=Phase.DECODE, device=i, busy_s=6.0, collective_s=c, wait_s=None, idle_s=2.0, window_s=8.0)
        for i, c in enumerate((1.0, 3.0))
    )  # fmt: skip
    measured = Measured(
        requests=(), n_profiled_steps={Phase.DECODE: 2}, loads=loads, times=(), findings=()
    )
    step = StepDuration(source=Source.MEASURED, phase=Phase.DECODE, step_s=4.0, basis="measured")
    events = _events(2)
    (bar,) = cost_bars(MetricInputs(events=events, measured=measured, steps=(step,)))
    assert dict(bar.segments) == {"compute": 2.0, "collectives, hidden or not": 1.0, "idle": 1.0}


def test_a_large_matrix_is_folded_without_losing_a_byte() -> None:
    n = 4 * MAX_SIDE
    inputs = MetricInputs(events=_events(n), experiment=ExperimentRecord(n_devices=n))
    chart = matrix_chart(inputs, Source.COMPILED)
    (matrix,) = chart.spec["data"]["values"]
    assert matrix["item"] == "prefill, tp"
    assert sum(matrix["load"]) == n * 2 * 100.0
    assert max(*matrix["source"], *matrix["target"]) == MAX_SIDE - 1


def test_every_chip_is_on_the_torus_once_with_its_devices() -> None:
    topology = parse_topology("tpu7x:2x2x2")
    events = _events(16)
    chart = torus_chart(link_traffic(events, topology), topology, Source.COMPILED)
    (links,), chips = (layer["data"]["values"] for layer in chart.spec["layer"][:2])
    devices = [int(d) for chip in chips for d in chip["devices"].split(",")]
    assert sorted(devices) == list(range(16))
    assert len(chips) == len({(chip["x"], chip["y"]) for chip in chips}) == 8
    assert all(load > 0 for load in links["load"])


def _folded(folder: Path, *rows: tuple[object, ...]) -> None:
    """Writes a timeline of one compiled step; the rows have these names."""
    names = ("lane", "part", "axis", "start_s", "dur_s", "repeats", "periods_s", "layers")
    constants = {"source": "compiled", "phase": "decode", "kind": None}
    types = {
        "layers": pl.List(pl.Int32),
        "repeats": pl.List(pl.Int64),
        "periods_s": pl.List(pl.Float64),
    }
    frame = pl.DataFrame(
        [{**constants, **dict(zip(names, r, strict=True)), "hlo_name": str(r[:2])} for r in rows],
        schema_overrides=types,
    )
    frame.write_parquet(folder / TIMELINE)


def _range(chart: Chart) -> list[float]:
    """The begin and end of what a timeline shows, and the end of the whole step."""
    return [param["value"] for param in chart.spec["params"]]


def _spans(chart: Chart) -> dict[str, list[Any]]:
    """The drawn spans of a timeline by column, with the names of their lanes."""
    bars, heads = chart.spec["layer"]
    (columns,) = bars["data"]["values"]
    lanes = [head["name"] for head in heads["data"]["values"]]
    return {**columns, "lane": [lanes[at] for at in columns["lane"]]}


def test_a_loop_is_unfolded_and_a_layer_in_its_middle_shown_first(tmp_path: Path) -> None:
    """Two chunks of a prompt, each of ten layers."""
    layers = list(range(10))
    _folded(
        tmp_path,
        ("core", "embed", None, 0.0, 1.0, [2], [31.0], None),
        ("core", "mlp", None, 1.0, 2.0, [2, 10], [31.0, 3.0], layers),
        ("collective", "mlp", "tp", 3.0, 1.0, [2, 10], [31.0, 3.0], layers),
    )
    (step,) = step_charts(tmp_path, MetricInputs(events=_events(2)))
    assert step.note == "Shown first: layer 5; reset shows the whole step."
    assert _range(step) == [16.0, 19.0, 62.0]
    assert step.description == "42 spans in 62 s."
    assert _spans(step)["lane"][:3] == ["core", "core", "tp"]


def test_a_measured_step_is_the_last_one_on_the_first_device() -> None:
    spans = [(device, step, 100.0 * step + device) for device in (0, 1) for step in (0, 1)]
    rows = [
        {
            "source": "measured", "phase": "decode", "device": device, "step": step, "start_s": start,
            "dur_s": 1.0, "kind": "all_reduce", "axis": "tp", "count": 1, "n_steps": 1, "wire_bytes": 5.0,
        }
        for device, step, start in spans
    ]  # fmt: skip
    timeline = pl.DataFrame(rows, schema=TIMELINE_SCHEMA)
    inputs = MetricInputs(events=_events(2, source="measured", phase="decode"), timeline=timeline)
    (step,) = step_charts(None, inputs)
    assert step.title == "One decode step (measured)"
    drawn = {"lane": ["tp"], "t": [0.0], "d": [1.0], "label": ["all_reduce"], "color": ["tp"]}
    assert _spans(step) == drawn


def test_charts_look_the_same_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = look()
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert look.__wrapped__() == expected
