"""Compiled programs of libtpu: parts, overlap and rows of a simulated step."""

import polars as pl
import pytest
from goldens import GOLDEN_DIR, GOLDENS

from meshscope.analysis.timeline import modeled_timeline
from meshscope.cost.steps import TimedStep, timed_step, timeline_table
from meshscope.events.enums import Phase
from meshscope.events.schema import table_of
from meshscope.hardware.topology import parse_topology
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import read_hlo

JAX = "0.10.2"


def _timed(name: str) -> tuple[TimedStep, list]:
    golden = GOLDENS[name]
    slices = f"{golden.n_slices}x" if golden.n_slices > 1 else ""
    topology = parse_topology(slices + golden.topology)
    module = read_hlo(GOLDEN_DIR / f"{name}.jax-{JAX}.txt.gz")
    collectives = module_collectives(
        module, mesh=Mesh(axes=golden.axes), crosses_slices=topology.crosses_slices
    )
    phase = Phase(golden.phase)
    step = timed_step(module, collectives, phase=phase, topology=topology)
    return step, step.rows(collectives.rows())


@pytest.mark.parametrize("name", GOLDENS)
def test_parts_sum_to_the_step_and_rows_to_its_collectives(name: str):
    timed, rows = _timed(name)
    step = timed.time
    assert step.compute_s + step.exposed_s + step.idle_s == pytest.approx(step.step.value_s)
    assert sum(part.compute_s for part in step.parts) == pytest.approx(step.compute_s)
    assert sum(part.exposed_s for part in step.parts) == pytest.approx(step.exposed_s)
    assert sum(step.exposed_by_axis_s.values()) == pytest.approx(step.exposed_s)
    if timed.simulated.unestimated:
        assert (step.step.low_s, step.step.high_s) == (None, None)
    else:
        assert step.step.low_s <= step.step.value_s <= step.step.high_s
    assert not any(note for note in step.notes if "loop" in note)
    known = [row for row in rows if row.dur_s is not None]
    # Every estimated collective has its row, and the rows sum to the simulated time.
    if not timed.simulated.unestimated:
        assert len(known) == len(rows)
        assert sum(r.dur_s * r.count for r in known) == pytest.approx(step.collective_s)
        assert sum(r.exposed_s * r.count for r in known) == pytest.approx(step.exposed_s)


@pytest.mark.parametrize(
    "name", [name.removesuffix("_scan") for name in GOLDENS if name.endswith("prefill_scan")]
)
def test_scanned_and_unrolled_layers_take_similar_times(name: str):
    """Not exactly: a scan slices each layer's weights out of their stack."""
    scanned, unrolled = (_timed(f"{name}_{loop}")[0].time for loop in ("scan", "unroll"))
    assert scanned.collective_s == pytest.approx(unrolled.collective_s, rel=0.05)
    assert scanned.step.value_s == pytest.approx(unrolled.step.value_s, rel=0.5)


def test_gathers_spread_over_fusions_and_permutes_of_a_collective_matmul_overlap_products():
    gathers, permutes = (
        _timed(name)[0].time for name in ("v5e_fsdp8_prefill_auto_async", "v6e_windowed_scan")
    )
    assert gathers.collective_s > 2 * gathers.compute_s
    assert gathers.collective_s - gathers.exposed_s > 0.7 * gathers.compute_s
    assert permutes.exposed_s < 0.7 * permutes.collective_s


def test_communicating_kernel_with_unknown_peers_has_no_time():
    timed, rows = _timed("v6e_kernel")
    assert timed.simulated.unestimated
    reason = timed.time.no_interval
    assert reason.startswith("the times lack 2 collectives of unknown bytes or devices")
    assert any(row.dur_s is None for row in rows)


# An instruction there combines the arrays of several layers or parts, and is one execution.
COMBINED = {"2xv6e_tp8_decode", "v6e_combined"}


@pytest.mark.parametrize("name", GOLDENS)
def test_the_timeline_has_the_layers_and_the_exposed_time_of_the_rows(name: str):
    timed, rows = _timed(name)
    timeline = modeled_timeline(timeline_table([timed]), table_of(rows))
    where = [] if name in COMBINED else ["layer", "part"]
    events = table_of(rows).with_columns(pl.lit("all").alias("all"))
    total = (pl.col("exposed_s") * pl.col("count")).sum()
    expected = events.group_by("all", *where).agg(total.alias("exposed_s"))
    collectives = timeline.filter(pl.col("kind").is_not_null())
    shown = collectives.group_by(pl.lit("all").alias("all"), *where).agg(pl.col("exposed_s").sum())
    if not timed.simulated.unestimated:  # as a kernel of unknown peers
        both = shown.join(expected, on=["all", *where], how="full", nulls_equal=True)
        assert both["exposed_s"].to_list() == pytest.approx(both["exposed_s_right"].to_list())
        compute = timeline.filter(pl.col("activity").is_not_null())
        assert {row.layer for row in rows} - {None} <= set(compute["layer"])
