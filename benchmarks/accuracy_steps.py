"""Published step times beside ours: measured ones of TPUs and GPUs, and the scaling book's formulas.

    python benchmarks/accuracy_steps.py             prints the tables
    python benchmarks/accuracy_steps.py compile     compiles the programs of the measured steps again

The compiled steps are kept in benchmarks/accuracy_steps.csv, with the versions that made them. No
constant of the compiled or the closed form was fitted to any of these figures: those of the closed
form come from compiled programs (benchmarks/closed_form.py), the share that attention kernels reach
from a paper on tpu7x, and the interval of the compiler's cycles from products of matrices.
"""

import csv
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from meshscope.backends.compile.compile import compile_experiment
from meshscope.cost.closed_form import ClosedSteps, closed_steps, plan_batch, plan_form
from meshscope.cost.efficiency import PEAKS
from meshscope.cost.features import Cost
from meshscope.cost.predicted import predicted_times
from meshscope.events.enums import Phase
from meshscope.spec.experiment import Experiment, experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.program import Engine, Loop, Program
from meshscope.spec.workload import Workload

CSV = Path(__file__).with_suffix(".csv")
CCL_BENCH = "CCL-Bench (cornell-sysphotonics/ccl-bench@1d257f0), vLLM 0.12 on v6e"
PAPER = "Xu et al., Characterizing Communication Patterns in Distributed LLM Inference"
BOOK = "How to Scale Your Model (jax-ml/scaling-book@0819a7d)"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One published figure and ours, in seconds.

    `sort` is measured, or formula where the source computes it. `is_device_bound` is false where the
    source's own software shows; such figures do not count towards the target.
    """

    source: str
    what: str
    sort: str
    published_s: float
    ours_s: float
    basis: str
    is_device_bound: bool
    note: str = ""

    @property
    def error(self) -> float:
        """Ours over published, minus 1."""
        return self.ours_s / self.published_s - 1


def lines() -> list[Line]:
    """Every step time that is published, beside ours."""
    return [*_ccl_bench(), *_serving_examples(), *_thirteen_billion(), *_h100()]


# One chunk of 8,192 tokens, 8 prompts of 1,024 (`cclbench.md`: the column called TPOT is this step).
CHUNKS = {
    1: ("v6e:1x1", 0.2218),
    2: ("v6e:1x2", 0.1778),
    4: ("v6e:2x2", 0.0851),
    8: ("v6e:2x4", 0.0977),
}


def _chunk(tp: int) -> Experiment:
    return experiment_of(
        model=read_model("meta-llama/Llama-3.1-8B"),
        plan=parse_plan(f"tp={tp}"),
        topology=parse_topology(CHUNKS[tp][0]),
        workload=Workload(batch=8, prompt=1024, output=1),
        program=Program(loop=Loop.SCAN),
    )


def compile_steps() -> None:
    """Compiles the chunks and keeps their times."""
    rows = []
    for tp in CHUNKS:
        with tempfile.TemporaryDirectory() as folder:
            result = compile_experiment(_chunk(tp), Path(folder), progress=lambda *_: None)
        (step,) = result.steps
        time = step.time
        rows.append(
            {
                "tp": tp,
                "step_s": f"{time.step.value_s:.6g}",
                "low_s": f"{time.step.lower_s:.6g}",
                "high_s": f"{time.step.upper_s:.6g}",
                "compute_s": f"{time.compute_s:.6g}",
                "exposed_s": f"{time.exposed_s:.6g}",
                "libtpu": version("libtpu"),
            }
        )
    write_steps(rows)


def write_steps(rows: list[dict[str, object]]) -> None:
    """Keeps the compiled steps."""
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _ccl_bench() -> list[Line]:
    with CSV.open() as file:
        compiled = {int(row["tp"]): row for row in csv.DictReader(file)}
    found: list[Line] = []
    for tp, (_, published_s) in CHUNKS.items():
        is_bound = tp < 8
        note = (
            "" if is_bound else "a step on the host's clock, and the host shows: slower than tp=4"
        )
        (closed,) = predicted_times(_chunk(tp))
        for basis, ours_s in (
            ("compiled", float(compiled[tp]["step_s"])),
            ("predicted", closed.step.value_s),
        ):
            found.append(
                Line(
                    source=CCL_BENCH,
                    what=f"Llama-3.1-8B, 8,192 tokens of prefill, tp={tp}",
                    sort="measured",
                    published_s=published_s,
                    ours_s=ours_s,
                    basis=basis,
                    is_device_bound=is_bound,
                    note=note,
                )
            )
    return found


def _closed(experiment: Experiment, phase: Phase) -> ClosedSteps:
    form = plan_form(experiment, phase, efficiency=PEAKS)
    workload = experiment.workload
    sizes = {n: np.array([float(getattr(workload, n))]) for n in ("batch", "prompt", "output")}
    return closed_steps(plan_batch([form]), np.zeros(1, dtype=np.int64), **sizes)


def _bytes_s(  # noqa: PLR0913, PLR0917  what the book gives
    model: str, topology: str, plan: str, batch: int, context: int, dtype: str
) -> float:
    """Weights and cache read once at the HBM's published rate: the book's step of decode."""
    experiment = experiment_of(
        model=read_model(model),
        plan=parse_plan(plan),
        topology=parse_topology(topology),
        workload=Workload(
            batch=batch, prompt=context - 1, output=1, weight_dtype=dtype, cache_dtype=dtype
        ),
    )
    read = (
        _closed(experiment, Phase.DECODE).costs[0][:, [Cost.WEIGHT_BYTES, Cost.CACHE_BYTES]].sum()
    )
    chip = experiment.topology.chip
    assert chip.hbm_bytes_per_s is not None
    return float(read) / (chip.hbm_bytes_per_s / chip.devices_per_chip)


def _serving_examples() -> list[Line]:
    """LLaMA-3-70B, int8, contexts of 8,192 (applied-inference.md), and 2 LLaMA-2-13B tables."""
    model = "meta-llama/Llama-3.3-70B"
    prompt = experiment_of(
        model=read_model(model),
        plan=parse_plan("tp=16"),
        topology=parse_topology("v5e:4x4"),
        workload=Workload(batch=1, prompt=8192, output=1),
    )
    flops = _closed(prompt, Phase.PREFILL).costs[0][:, :3].sum()
    at_40 = float(flops) / (prompt.topology.chip.bf16_flops_per_s or 1) / 0.4
    common = {"source": f"{BOOK}, applied-inference.md", "sort": "formula", "is_device_bound": True}
    return [
        Line(
            what="LLaMA-3-70B int8, decode of 32 on v5e 4x2",
            published_s=0.017,
            ours_s=_bytes_s(model, "v5e:2x4", "tp=8", 32, 8192, "s8"),
            basis="bytes of our weights and cache at the HBM's peak",
            **common,
        ),
        Line(
            what="the same on v5e 4x4",
            published_s=0.0085,
            ours_s=_bytes_s(model, "v5e:4x4", "tp=16", 32, 8192, "s8"),
            basis="bytes of our weights and cache at the HBM's peak",
            **{**common, "is_device_bound": False},
            note="8 key and value heads on 16 devices: ours holds each twice, the book splits them",
        ),
        Line(
            what="LLaMA-3-70B, 8,192 tokens of prefill on 16 v5e at 40 % of the peak",
            published_s=0.91,
            ours_s=at_40,
            basis="flops of our program at 40 % of the peak",
            **common,
            note="ours counts attention, which the book's 2 x tokens x parameters leaves out",
        ),
    ]


THIRTEEN = {1: 4.98e-3, 8: 12.13e-3, 16: 20.30e-3, 32: 36.65e-3, 64: 69.33e-3, 240: 249.09e-3}


def _thirteen_billion() -> list[Line]:
    """Contexts of 8,192 in bf16 on 8 v5e of 0.82 TB/s (inference.md)."""
    return [
        Line(
            source=f"{BOOK}, inference.md",
            what=f"LLaMA-2-13B, decode of {batch} on 8 v5e",
            sort="formula",
            published_s=published_s,
            ours_s=_bytes_s("meta-llama/Llama-2-13B", "v5e:2x4", "tp=8", batch, 4096, "bf16")
            + (batch * 4096 * 819_200) / 8 / 8.1e11,
            basis="bytes of our weights and cache at the HBM's peak",
            is_device_bound=True,
            note="the model has 4,096 positions: the cache of the others is added",
        )
        for batch, published_s in THIRTEEN.items()
    ]


# (figure, model, topology, plan) -> TTFT and TPOT in seconds, as the text of section V tells them.
FIGURES = {
    ("8", "meta-llama/Llama-3.2-3B", "h100:2", "tp=2"): (0.150, 1.17e-3),
    ("8", "meta-llama/Llama-3.2-3B", "h100:4", "tp=4"): (0.090, 0.86e-3),
    ("8", "meta-llama/Llama-3.2-3B", "2xh100:4", "tp=8"): (0.030, 11.56e-3),
    ("9", "meta-llama/Llama-3.2-3B", "h100:2", "pp=2"): (0.430, 2e-3),
    ("9", "meta-llama/Llama-3.2-3B", "h100:4", "pp=4"): (1.110, 2e-3),
    ("9", "meta-llama/Llama-3.2-3B", "2xh100:4", "pp=8"): (2.520, 19.22e-3),
    ("10", "meta-llama/Llama-2-13B", "2xh100:4", "tp=8"): (0.070, 18e-3),
    ("10", "meta-llama/Llama-2-13B", "2xh100:4", "pp=2,tp=4"): (float("nan"), 103e-3),
}


def _h100() -> list[Line]:
    """One request of 128 tokens in and 128 out; times are those of a server, its software included."""
    found: list[Line] = []
    for (figure, model, topology, plan), published in FIGURES.items():
        experiment = experiment_of(
            model=read_model(model),
            plan=parse_plan(plan),
            topology=parse_topology(topology),
            workload=Workload(batch=1, prompt=128, output=128),
            engine=Engine.VLLM,
        )
        for name, published_s, time in zip(
            ("TTFT", "TPOT"), published, predicted_times(experiment), strict=True
        ):
            if published_s == published_s:  # noqa: PLR0124  nan where the text tells none
                found.append(
                    Line(
                        source=f"{PAPER}, figure {figure}",
                        what=f"{model.rsplit('/', 1)[-1]} on {topology}, {plan}, {name}",
                        sort="measured",
                        published_s=published_s,
                        ours_s=time.step.value_s,
                        basis="predicted",
                        is_device_bound=name == "TPOT" and not topology.startswith("2x"),
                        note=_h100_note(name, topology),
                    )
                )
    return found


def _h100_note(name: str, topology: str) -> str:
    """Why a figure is not that of the devices; nothing where it is."""
    if name == "TTFT":
        return "a server's first token: at 128 tokens its own software is nearly all of it"
    if topology.startswith("2x"):
        return "over two nodes each message takes some 190 us more than NCCL's own figures"
    return ""


@dataclass(frozen=True, kw_only=True)
class Winner:
    """Which of a figure's plans is fastest by a metric, published and by us, and how much slower the next is."""

    figure: str
    metric: str
    published: str
    published_factor: float
    ours: str
    ours_factor: float


def winners() -> list[Winner]:
    """Of each figure and metric of the paper with at least two plans told."""
    told: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for one in _h100():
        figure = one.source.rsplit(" ", 1)[-1]
        model_and_slice, plan, metric = one.what.rsplit(", ", 2)
        assert model_and_slice
        told.setdefault((figure, metric), {})[plan] = (one.published_s, one.ours_s)
    return [_winner(*key, plans) for key, plans in told.items() if len(plans) > 1]


def _winner(figure: str, metric: str, plans: dict[str, tuple[float, float]]) -> Winner:
    ranked = [sorted(plans, key=lambda plan: plans[plan][side]) for side in (0, 1)]
    factors = [plans[order[1]][side] / plans[order[0]][side] for side, order in enumerate(ranked)]
    return Winner(
        figure=figure,
        metric=metric,
        published=ranked[0][0],
        published_factor=factors[0],
        ours=ranked[1][0],
        ours_factor=factors[1],
    )


# Where the target is missed, and why.
REASONS = (
    (
        "tp=4 of CCL-Bench is measured at 85.1 ms, less than a quarter of its own tp=1 (55.5 ms) and its "
        "own 64 all-reduces of 67.1 MB (38.6 ms at the 167 GB/s on the wire that it reports) one after "
        "the other, which are 94 ms. So its program hides a part of its communication, or not every step "
        "is a whole chunk; in ours, as compiled, no all-reduce hides: 37 of our 110 ms are all-reduces, "
        "73 the core's. 7 of these are two passes a layer over the residual stream (the sum over tp is added, "
        "then normed). With the compiler's estimates of these passes it would be 18 ms more (+51 %); they "
        "contradict what passes were measured to take on v5p, v6e and tpu7x (benchmarks/pass_cycles.py), "
        "so that passes are priced by their bytes."
    ),
    (
        "What remains too long at tp=1 and tp=4 are products of matrices with something fused into them. "
        "The compiler puts those of the MLP at 47 to 79 % of the peak; on v5p, 26 such products of "
        "a MaxText step were measured at 71 to 94 %. A v6e has four times the matrix unit for the same vector "
        "unit, so that these figures do not carry over, and the compiler's cycles are kept."
    ),
    (
        "TTFT of the paper is 13 to 900 times ours. 128 tokens of a 3B model are 0.8 TFLOP, which two "
        "H100 do in two milliseconds; the rest is the server's software."
    ),
    (
        "TPOT within a node is what reading weights takes, and a few us a message. What GPUs reach of their "
        "peaks is from measurements of others (src/meshscope/cost/rates.py), and nothing of the paper was "
        "fitted on. With 85 % of the HBM's rate, which TPUs reach, its four figures came out 10 to 20 % too "
        "long: at the peak itself the 3.2 GB of tp=2 take 0.96 of its 1.17 ms, the 6.4 GB of pp 1.92 of "
        "its 'approximately 2 ms'."
    ),
    (
        "Over two nodes the paper's TPOT at tp=8 is 10.7 ms above that at tp=4, for 57 all-reduces: 188 us "
        "each. The model has published rates of the wires and NCCL's own latencies, nothing of that cluster."
    ),
)


def markdown() -> str:
    """The tables of docs/accuracy.md about steps, and what they say of the target."""
    found = lines()
    rows = [
        "| source | what | published | ours | error | basis |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| {one.source} ({one.sort}) | {one.what} | {one.published_s * 1e3:.3g} ms "
        f"| {one.ours_s * 1e3:.3g} ms | {one.error:+.0%} | {one.basis}{'; ' if one.note else ''}{one.note} |"
        for one in found
    ]
    for sort in ("measured", "formula"):
        for basis in dict.fromkeys(one.basis for one in found if one.sort == sort):
            errors = [
                abs(one.error)
                for one in found
                if (one.sort, one.basis, one.is_device_bound) == (sort, basis, True)
            ]
            if errors:
                rows.append("")
                rows.append(
                    f"{sort}, {basis}, device-bound, {len(errors)} figures: median error "
                    f"{np.median(errors):.1%}, worst {max(errors):.1%}."
                )
    rows += ["", "| figure | metric | fastest, published | ours |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {one.figure} | {one.metric} | {one.published}, {one.published_factor:.2f} x faster than the next "
        f"| {one.ours}, {one.ours_factor:.2f} x |"
        for one in winners()
    ]
    return "\n".join([*rows, "", *(f"- {reason}" for reason in REASONS)])


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        compile_steps()
    print(markdown())
