"""Searches of a million combinations: counted first, every one accounted for, in bounded memory."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import meshscope
from meshscope.errors import SpecError
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.chunks import ChunkRule
from meshscope.plans.memory import FitState
from meshscope.plans.workload import Workload
from meshscope.serving import grid as grid_module
from meshscope.serving.grid import SearchProgress, grid_of, n_combinations
from meshscope.serving.objective import pareto_front
from meshscope.serving.search import plans_of
from meshscope.serving.space import SearchSpace, parse_batches

MILLION = """
import re, sys, time
import meshscope
reports = []
result = meshscope.plan(
    "Qwen/Qwen3-30B-A3B", topology="v6e-16", batch="8:6144:8", prefill_chunk="1024,2048,off",
    weight_dtype="bf16,s8,s4", cache_dtype="bf16,s8,f8e4m3fn", slo="ttft=2,tpot=0.05",
    progress=lambda *report: reports.append(report),
)
peak_kib = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(result.search.n_candidates, result.search.n_combinations, int(peak_kib) // 1024, reports[0][1])
"""


def _space(batch: str = "8:64:8") -> SearchSpace:
    return SearchSpace(
        model=read_model("Qwen/Qwen3-30B-A3B"),
        topology=parse_topology("v6e-8"),
        workload=Workload(batch=1, prompt=1024, output=128),
        batches=parse_batches(batch),
        weight_dtypes=("bf16", "s8"),
        cache_dtypes=("bf16", "s8"),
        chunks=(512, 8192, ChunkRule.OFF),
    )


def test_every_counted_combination_is_predicted_or_left_out_with_a_reason() -> None:
    space = _space("64:4096:64")
    plans = plans_of(space)
    grid = grid_of(space, plans)
    n_by_hand = sum(
        1
        for plan, batch, _ in product(plans.plans, range(64, 4097, 64), range(2 * 2 * 3))
        if batch % plan.data_size == 0
    )
    assert n_combinations(space, plans) == grid.n_combinations == n_by_hand
    assert len(grid) + sum(grid.n_pruned.values()) == n_by_hand
    assert len(grid.n_pruned) > 1
    assert all(n > 0 for n in grid.n_pruned.values())


def test_plans_in_small_groups_have_the_same_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    space = _space()
    whole = grid_of(space, plans_of(space))
    monkeypatch.setattr(grid_module, "GROUP_STEPS", 100)
    parts = grid_of(space, plans_of(space))
    for name in ("plan", "weight_dtype", "cache_dtype", "batch", "chunk"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    for name in ("ttft_s", "tpot_s"):  # sums over padded arrays of other widths
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12)


def test_a_candidate_fits_if_its_own_memory_does() -> None:
    """A search bisects the batches; each alone has the same answer."""
    space = replace(_space("64:8192:64"), chunks=(2048,))
    grid = grid_of(space, plans_of(space))
    sample = np.random.default_rng(1).permutation(len(grid))[:300]
    expected = [grid.memory(at).fit in {FitState.YES, FitState.UNKNOWN} for at in sample]
    assert [grid.fits(at) for at in sample] == expected
    assert set(expected) == {True, False}


@pytest.mark.slow
def test_the_front_of_many_blocks_is_that_of_each_row() -> None:
    figures = np.random.default_rng(2).integers(0, 400, (6_000, 3)).astype(float)
    front = pareto_front(figures)
    beaten = [
        bool(((figures <= row).all(axis=1) & (figures < row).any(axis=1)).any()) for row in figures
    ]
    expected = {tuple(row) for row, is_beaten in zip(figures, beaten, strict=True) if not is_beaten}
    assert {tuple(figures[at]) for at in front} == expected
    assert len(front) == len(expected)


@pytest.mark.slow
def test_a_million_pairs_are_ranked_within_half_a_gigabyte() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MILLION], capture_output=True, text=True, check=True
    )
    match = re.fullmatch(r"(\d+) (\d+) (\d+) (.*)\n", done.stdout)
    n_candidates, n_counted, peak_mib = map(int, match.groups()[:3])
    assert n_candidates > 1_000_000
    assert peak_mib < 512
    assert match[4] == f"229 plans and {n_counted:,} combinations on v6e:4x4"


def test_the_time_left_is_that_of_the_others_at_the_speed_so_far() -> None:
    now = iter([0.0, 1.0, 5.0, 6.0, 10.0])
    reports: list[tuple[str, str, float | None]] = []
    progress = SearchProgress(lambda *report: reports.append(report), clock=lambda: next(now))
    progress.counted("v6e:2x4", 44, 200_000)
    for _ in range(4):
        progress.add(25_000)
    progress.done()
    assert reports == [
        ("search", "44 plans and 200,000 combinations on v6e:2x4", None),
        ("search", "50,000 of 200,000 combinations", pytest.approx(15.0)),
        ("search", "100,000 of 200,000 combinations", pytest.approx(10.0)),
        ("search", "done", None),
    ]


def test_a_short_search_reports_nothing_and_several_slices_have_no_time_left(monkeypatch) -> None:
    reports: list[tuple[str, float | None]] = []

    def result_of(topology: str):
        def progress(_, step: str, left_s: float | None) -> None:
            reports.append((step, left_s))

        return meshscope.plan(
            "Qwen/Qwen3-8B", topology=topology, slo="ttft=0.006", progress=progress
        )

    result_of("v6e-8")
    assert not reports
    monkeypatch.setattr(grid_module, "REPORT_S", 0.0)
    first, last = result_of("v6e-4,v6e-8").slices.searches
    n = last.n_combinations
    done = (f"{n:,} of {n:,} combinations on slice 2 of 2", None)
    assert first.n_combinations > 0
    assert reports[-2:] == [done, ("done", None)]


def test_more_combinations_than_fit_in_memory_are_counted_and_refused() -> None:
    space = _space("1:1000000:1")
    with pytest.raises(
        SpecError, match=r"has [\d,]+ combinations of [\d,]+ plans.* Narrow --batch"
    ):
        grid_of(space, plans_of(space))


@pytest.mark.parametrize(
    ("batch", "data_size", "expected"),
    [("8:32:8", 8, (8, 16, 24, 32)), ("8:32:8", 16, (16, 32)), ("6:20:7", 1, (6, 13, 20))],
)
def test_a_range_with_a_step_has_the_batches_that_the_data_axis_divides(
    batch, data_size, expected
) -> None:
    assert tuple(parse_batches(batch).of(data_size)) == expected


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(("batch", text) for text in ("8:64:0", "8:64:-8", "8:64:x", "8:64:8:8", "8:64:")),
        *(("prefill_chunk", text) for text in ("512,", "512,many", ",", "512,-1", "0")),
    ],
)
def test_a_wrong_step_or_chunk_is_refused(option: str, text: str) -> None:
    message = f'batch="{text}"' if option == "batch" else option
    with pytest.raises(SpecError, match=message):
        meshscope.plan("Qwen/Qwen3-8B", topology="v6e-4", **{option: text})
