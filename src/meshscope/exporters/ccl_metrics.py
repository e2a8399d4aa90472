"""CCL-Bench's 25 metrics twice: with our figures, and as its tools compute them, with what is wrong there.

The definitions "as coded" were read in cornell-sysphotonics/ccl-bench@1d257f0 for traces of TPUs; where
we wrote a trace for its tools, their figure is computed here in the same way: checked by running those
tools over the trace of a compiled Llama-3.1-8B (3 layers, tp=8, v6e-8), where the nine of them that give a
figure agreed to nine digits. A figure that is not known is null with its reason.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import polars as pl

from meshscope.analysis.catalog import metrics_of
from meshscope.analysis.metric import Unavailable
from meshscope.analysis.run_inputs import metric_inputs
from meshscope.events.enums import Kind, Phase
from meshscope.store.run import RunRecord

Event = Mapping[str, Any]
Tables = Mapping[str, Any]

GIB = 2**30
PS_PER_S, US_PER_S = 1e12, 1e6
STEP = "$core.py:331 step"
COLLECTIVES = {
    "allreduce": Kind.ALL_REDUCE,
    "allgather": Kind.ALL_GATHER,
    "reducescatter": Kind.REDUCE_SCATTER,
    "alltoall": Kind.ALL_TO_ALL,
}
NO_TRACE = "no trace with times was written, so that its tools have nothing to read"
NOT_ON_TPU = "its tools have no form of it for TPU traces"
NOT_HERE = "not computed here: its tool computes it from the trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One metric: what ours is and how it is defined, and how theirs is made, with its faults."""

    name: str
    unit: str
    definition: str
    ours: Callable[[Tables], float | None]
    as_coded: str
    faults: tuple[str, ...] = ()
    theirs: Callable[[Sequence[Event]], float | None] | None = None
    is_for_tpu: bool = True  # whether its tool takes traces of TPUs


def metrics_told_apart(
    run: RunRecord, events: Sequence[Event], *, n_steps: int | None
) -> dict[str, Any]:
    """Each metric by its name: ours and theirs, with definitions and faults."""
    found = {
        name: None if isinstance(result, Unavailable) else result.filter(*_strongest(result, run))
        for name, result in metrics_of(metric_inputs(run)).items()
    }
    return {
        "source": run.manifest.source.value,
        "n_steps_in_trace": n_steps,
        "metrics": {told.name: _entry(told, found, events) for told in TOLD},
    }


def _strongest(result: pl.DataFrame, run: RunRecord) -> list[pl.Expr]:
    has_source = "source" in result.columns
    return [pl.col("source") == run.manifest.source.value] if has_source else [pl.lit(value=True)]


def _entry(told: Told, tables: Tables, events: Sequence[Event]) -> dict[str, Any]:
    ours = _finite(told.ours(tables))
    theirs = None if told.theirs is None or not events else _finite(told.theirs(events))
    missing = _reason(told, events)
    return {
        "unit": told.unit,
        "ours": {
            "value": ours,
            "definition": told.definition,
            **({} if ours is not None else {"reason": "the run does not have what it needs"}),
        },
        "as_coded_by_ccl_bench": {
            "value": theirs,
            "definition": told.as_coded,
            **({} if theirs is not None else {"reason": missing}),
        },
        "faults_of_theirs": list(told.faults),
    }


def _reason(told: Told, events: Sequence[Event]) -> str:
    if not told.is_for_tpu:
        return NOT_ON_TPU
    if told.theirs is None:
        return NOT_HERE
    return NO_TRACE if not events else "it gives none for this trace"


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _value(table: str, column: str, **where: Any) -> Callable[[Tables], float | None]:
    """The one figure of a metric's table; null without the table, or where it has several rows."""

    def of(tables: Tables) -> float | None:
        found = tables.get(table)
        if found is None:
            return None
        rows = found.filter(**{k: v for k, v in where.items() if k in found.columns})
        return rows[column][0] if len(rows) == 1 else None

    return of


def _mean_of(table: str, column: str, **where: Any) -> Callable[[Tables], float | None]:
    def of(tables: Tables) -> float | None:
        found = tables.get(table)
        rows = None if found is None else found.filter(**where)
        return None if rows is None or rows.is_empty() else rows[column].mean()

    return of


def _step_s(phase: Phase) -> Callable[[Tables], float | None]:
    def of(tables: Tables) -> float | None:
        for table in ("mfu", "overlap"):
            found = tables.get(table)
            rows = None if found is None else found.filter(phase=phase.value)
            if rows is not None and not rows.is_empty():
                return rows["step_s"].max()
        return None

    return of


def _volume(kinds: Sequence[Kind]) -> Callable[[Tables], float | None]:
    """Payload of one prefill step on one chip, in GB."""

    def of(tables: Tables) -> float | None:
        found = tables.get("volume")
        if found is None:
            return None
        own = found.filter(
            pl.col("phase") == Phase.PREFILL.value, pl.col("kind").is_in([k.value for k in kinds])
        )
        return None if own["n_unsized"].sum() else float(own["payload_bytes"].sum()) / 1e9

    return of


def _busbw(kind: Kind) -> Callable[[Tables], float | None]:
    """Bus bandwidth of the sort of this kind that moves most, in GB/s."""

    def of(tables: Tables) -> float | None:
        for table in ("bandwidth", "measured_bandwidth"):
            found = tables.get(table)
            rows = None if found is None else found.filter(kind=kind.value)
            if rows is not None and not rows.is_empty():
                moved = pl.col("payload_bytes") * pl.col("count")
                return rows.sort(moved, descending=True)["busbw_bytes_per_s"][0] / 1e9
        return None

    return of


def _unknown(_tables: Tables) -> float | None:
    return None


# As coded: the same arithmetic on the events of the trace.


def _ops(events: Sequence[Event]) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and "hlo_category" in e["args"]]


def _steps(events: Sequence[Event]) -> list[float]:
    return [e["dur"] / US_PER_S for e in events if e["name"] == STEP]


def _coded_avg_step(events: Sequence[Event]) -> float | None:
    steps = _steps(events)
    kept = steps[1:-1] if len(steps) > 2 else steps
    return fmean(kept) if kept else None


def _coded_ttft(events: Sequence[Event]) -> float | None:
    steps = _steps(events)
    return steps[0] if steps else None


def _coded_tpot(events: Sequence[Event]) -> float | None:
    kept = _steps(events)[1:-1]
    return fmean(kept) if kept else None


def _coded_volume(*categories: str) -> Callable[[Sequence[Event]], float | None]:
    def of(events: Sequence[Event]) -> float | None:
        own = [e["args"] for e in _ops(events) if e["args"]["hlo_category"] in categories]
        return sum(int(a.get("bytes_accessed", 0)) for a in own) / 1e9

    return of


def _coded_bandwidth(category: str) -> Callable[[Sequence[Event]], float | None]:
    def of(events: Sequence[Event]) -> float | None:
        members: dict[str, list[Event]] = defaultdict(list)
        for event in _ops(events):
            if event["args"]["hlo_category"] == category:
                members[event["name"]].append(event)
        rates: list[float] = []
        for same in members.values():
            n = len({event["pid"] for event in same})
            factor = (2 if category == "all-reduce" else 1) * (n - 1) / n
            for event in same:
                seconds = float(event["args"]["device_duration_ps"]) / PS_PER_S
                accessed = int(event["args"].get("bytes_accessed", 0))
                rates.append(accessed / GIB * factor / seconds if seconds else 0.0)
        return median(rates) if rates else None

    return of


def _coded_comm_time(events: Sequence[Event]) -> float | None:
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective")
    own = [e for e in _ops(events) if any(name in e["name"] for name in names)]
    seconds = sum(float(e["args"]["device_duration_ps"]) / PS_PER_S for e in own)
    return seconds / max(1, len(_steps(events)))


def _coded_comm_fraction(events: Sequence[Event]) -> float | None:
    names = {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
        "broadcast",
    }
    shares: list[float] = []
    by_pid: dict[int, list[Event]] = defaultdict(list)
    for event in _ops(events):
        by_pid[event["pid"]].append(event)
    for own in by_pid.values():
        whole = sum(e["dur"] for e in own)
        part = sum(e["dur"] for e in own if e["args"]["hlo_category"] in names)
        shares.append(100 * part / whole if whole else 0.0)
    return fmean(shares) if shares else None


def _percent(of: Callable[[Tables], float | None]) -> Callable[[Tables], float | None]:
    def scaled(tables: Tables) -> float | None:
        share = of(tables)
        return None if share is None else 100 * share

    return scaled


def _communication_percent(tables: Tables) -> float | None:
    """Share of a prefill step in which collectives run, by union, mean of the devices."""
    found = tables.get("overlap")
    rows = None if found is None else found.filter(phase=Phase.PREFILL.value)
    if rows is None or rows.is_empty():
        return None
    return float((100 * rows["collective_s"] / rows["step_s"]).mean())


def _bandwidth_entry(short: str, kind: Kind) -> Told:
    category = kind.value.replace("_", "-")
    return Told(
        name=f"bandwidth_utilization_{short}_group_6",
        unit="GB/s",
        definition="bus bandwidth (wire bytes over duration, nccl-tests) of the sort that moves most",
        ours=_busbw(kind),
        as_coded="median of bytes_accessed / 2^30 x f(n) / duration over events of this hlo_category",
        faults=(
            "GiB are printed as GB",
            "bytes_accessed is input and output together, about twice the payload",
            "named a utilization, though it is a rate",
            "asynchronous (-start, -done) and fused collectives are missed",
        ),
        theirs=_coded_bandwidth(category),
    )


def _volume_entry(short: str, kinds: Sequence[Kind]) -> Told:
    return Told(
        name=f"collective_vol_{short}_gb",
        unit="GB",
        definition="payload of one prefill step on one chip (nccl-tests size rule), 1 GB = 1e9 bytes",
        ours=_volume(kinds),
        as_coded="sum of bytes_accessed of these hlo_categories over the first trace file",
        faults=(
            "labelled rank 0 and one step: it is all chips in the file and the whole trace",
            "bytes_accessed is input and output together",
            "asynchronous and fused collectives are missed",
        ),
        theirs=_coded_volume(*(kind.value.replace("_", "-") for kind in kinds)),
    )


TOLD: tuple[Told, ...] = (
    Told(
        name="avg_step_time", unit="s", definition="time of one decode step",
        ours=_step_s(Phase.DECODE),
        as_coded="mean duration of host events '$core.py:331 step', the first and last dropped",
        faults=(
            "a step is one line of one version of vLLM; any other falls back to wall time over iterations",
            "steps of prefill and decode are mixed",
        ),
        theirs=_coded_avg_step,
    ),
    Told(
        name="ttft", unit="s", definition="start of a request to its first token: prefill, on the devices",
        ours=_step_s(Phase.PREFILL),
        as_coded="duration of the first step event",
        faults=("the first step need not be a prefill, nor a whole one", "no queue, no tokenizer"),
        theirs=_coded_ttft,
    ),
    Told(
        name="tpot", unit="s", definition="time after the first token over the tokens after it",
        ours=_step_s(Phase.DECODE),
        as_coded="mean of the steps between the first and the last",
        faults=(
            "nothing checks that these steps decode: published TPU rows are chunks of prefill",
            "a card without output_len passes the check for output_len > 1",
        ),
        theirs=_coded_tpot,
    ),
    Told(
        name="mfu", unit="%", definition="model FLOPs (PaLM, appendix B) of a prefill step over peak x chips x step",
        ours=_percent(_mean_of("mfu", "mfu_frac", phase=Phase.PREFILL.value)),
        as_coded="sum of model_flops over the union of events that have some, over peak (a100, h100, v6e)",
        faults=(
            "idle time is left out, so that it overstates",
            "events of loops and calls count the FLOPs of what they contain again",
            "other chips have no peak there",
        ),
    ),
    Told(
        name="mean_sm_coverage", unit="%", definition="no such thing on a TPU",
        ours=_unknown, as_coded="min(blocks per SM, 1), weighted by duration or not, by kind of trace",
        is_for_tpu=False, faults=("two definitions in one column",),
    ),
    Told(
        name="dominant_kernel_concentration", unit="%", definition="not computed: it needs a profile's kernels",
        ours=_unknown, as_coded="largest share of one hlo_category in device time",
        faults=("a category on TPU, a kernel on GPU",),
    ),
    Told(
        name="moe_fraction", unit="%", definition="not computed here: see `volume` by part, moe.*",
        ours=_unknown, as_coded="share of events whose names look like experts'",
        faults=("names such as ATen's dispatch match",),
    ),
    Told(
        name="average_memory_bandwidth", unit="GB/s", definition="not computed: see `mbu`, a share of the HBM's peak",
        ours=_unknown, as_coded="bytes of copy-start/copy-done pairs over the time between them",
        faults=("explicit copies alone, which is not the bandwidth of the HBM", "pairs by number across devices"),
    ),
    Told(
        name="memory_transfer_overhead", unit="%", definition="not computed", ours=_unknown,
        as_coded="union of copies without compute over the sum of steps",
        faults=("clocks of all chips are mixed in one set of intervals",),
    ),
    Told(
        name="communication_fraction", unit="%",
        definition="share of a prefill step in which collectives run, by union, asynchronous ones included",
        ours=_communication_percent,
        as_coded="duration of collectives over that of all events of a device",
        faults=(
            "events that contain others count beside them, so that it understates",
            "asynchronous all-gathers and all-reduces are missed",
            "a local broadcast counts as communication",
        ),
        theirs=_coded_comm_fraction,
    ),
    Told(
        name="total_communication_time", unit="s",
        definition="time of a prefill step in which a device's collectives run, by union, mean of devices",
        ours=_mean_of("overlap", "collective_s", phase=Phase.PREFILL.value),
        as_coded="sum of the durations of events named like collectives, over iterations",
        faults=("summed over all chips, overlaps counted twice", "host events count by their names"),
        theirs=_coded_comm_time,
    ),
    *(_bandwidth_entry(short, kind) for short, kind in COLLECTIVES.items()),
    Told(
        name="bandwidth_utilization_peertopeer_group_6", unit="%", definition="not computed",
        ours=_unknown, as_coded="NVLink and PCIe throughput around one NVTX range",
        is_for_tpu=False, faults=("three model families are written into the code",),
    ),
    Told(
        name="compute_comm_overlap", unit="%",
        definition="time in which a device's collectives and compute run together over its collectives' time",
        ours=_percent(_mean_of("overlap", "overlap_frac", phase=Phase.PREFILL.value)),
        as_coded="the same by names of events, with all devices and the host in one set",
        faults=("compute of one chip hides communication of another: 82 % with one chip and no collective",),
    ),
    Told(
        name="load_imbalance_ratio", unit="1 is balanced",
        definition="busy time of the busiest device over the mean, without waiting, in prefill",
        ours=_value("load_imbalance", "imbalance_without_wait", phase=Phase.PREFILL.value),
        as_coded="largest over smallest busy time of ranks",
        is_for_tpu=False, faults=("kernels that wait count as busy", "16 ranks are sampled"),
    ),
    Told(
        name="straggler", unit="share of 1", definition="not computed: see `waiting` and `load_imbalance`",
        ours=_unknown, as_coded="(largest - smallest) / largest time in NCCL kernels",
        is_for_tpu=False, faults=("0 where no file matches",),
    ),
    Told(
        name="scale_up_bw_utility", unit="%", definition="not computed", ours=_unknown,
        as_coded="a simulation (ASTRA-sim) with twice the bandwidth",
        is_for_tpu=False, faults=("a ring stands for the torus",),
    ),
    *(_volume_entry(short, (kind,)) for short, kind in COLLECTIVES.items()),
    _volume_entry("total", tuple(COLLECTIVES.values())),
)  # fmt: skip
