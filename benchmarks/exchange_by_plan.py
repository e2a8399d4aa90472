"""What plans of DeepSeek-V3.1 send in a layer of prefill, and the MFU that this permits; for docs/evidence/experts.md.

Run: python benchmarks/exchange_by_plan.py. Bytes are those of the predicted collectives, which equal the
compiled ones; their times come from the interconnect model, FLOPs count at the bf16 peak. Nothing is compiled.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshscope.cost.collectives import predict
from meshscope.cost.predicted import predicted_times, timed_predictions
from meshscope.events.collective import Collective
from meshscope.events.enums import Part, Phase
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.weights import device_weight_bytes
from meshscope.plans.workload import Workload
from meshscope.units import format_bytes, format_gib, format_seconds

MODEL, TOPOLOGY = read_model("deepseek-ai/DeepSeek-V3.1-Base"), parse_topology("v6e:8x8")
TOKENS_OF_DEVICE = 1024
LAYER = 10  # any with experts
PLANS = (
    *("dp=64,ep=64", "dp=32,tp=2,ep=64", "dp=16,tp=4,ep=64", "dp=8,tp=8,ep=64"),
    *("dp=8,tp=8,ep=64,sp", "dp=4,tp=16,ep=64", "dp=16,tp=4,ep=16", "dp=8,tp=8,ep=8"),
)
ROUTED = (Part.MOE_EXPERTS, Part.MOE_SHARED)


class PlanLayer(NamedTuple):
    """A layer of experts in prefill on one device: bytes sent, and seconds."""

    plan: str
    weights_bytes: int  # of the model
    exchange_bytes: float
    other_bytes: float
    exchange_s: float
    other_s: float
    flops_s: float  # of the layer at the peak
    routed_s: float  # the part of routed and shared experts in flops_s

    @property
    def mfu(self) -> float:
        """The bound if no communication overlaps."""
        return self.flops_s / (self.flops_s + self.exchange_s + self.other_s)

    @property
    def overlapped_mfu(self) -> float:
        """The bound if the exchange overlaps with the experts."""
        exposed_s = max(0.0, self.exchange_s - self.routed_s) + self.other_s
        return self.flops_s / (self.flops_s + exposed_s)


def experiment(plan: str) -> Experiment:
    """Prefill of 1,024 tokens a device in fp8, in one chunk."""
    parsed = parse_plan(plan)
    return experiment_of(
        model=MODEL,
        plan=parsed,
        topology=TOPOLOGY,
        workload=Workload(
            batch=64,
            prompt=TOKENS_OF_DEVICE,
            output=1,
            weight_dtype="f8e4m3fn",
            prefill_chunk=TOPOLOGY.n_devices * TOKENS_OF_DEVICE // parsed.data_size,
        ),
    )


def layers() -> Iterator[PlanLayer]:
    """The layer under each plan."""
    for plan in PLANS:
        step = experiment(plan)
        time = next(t for t in predicted_times(step) if t.phase is Phase.PREFILL)
        rows = [r for r in timed_predictions(predict(step), step) if r.layer == LAYER]
        exchange = [r for r in rows if r.kind == "all_to_all" or r.part == Part.MOE_DISPATCH]
        other = [r for r in rows if r not in exchange]
        n_layers = {Part.MOE_EXPERTS: 58, Part.MOE_SHARED: 58, Part.MOE_ROUTER: 58}
        flops = {
            part.part: (part.flops or 0.0) / n_layers.get(Part(part.part), MODEL.n_layers)
            for part in time.parts
            if part.part in {*ROUTED, Part.MOE_ROUTER, Part.ATTN}
        }
        peak = TOPOLOGY.chip.bf16_flops_per_s
        assert peak is not None
        yield PlanLayer(
            plan=plan,
            weights_bytes=device_weight_bytes(MODEL, step.plan, "f8e4m3fn"),
            exchange_bytes=_sent(exchange),
            other_bytes=_sent(other),
            exchange_s=sum((r.dur_s or 0.0) * r.count for r in exchange),
            other_s=sum((r.dur_s or 0.0) * r.count for r in other),
            flops_s=sum(flops.values()) / peak,
            routed_s=sum(flops.get(part, 0.0) for part in ROUTED) / peak,
        )


def _sent(rows: list[Collective]) -> float:
    return float(sum((r.wire_bytes or 0) * r.count for r in rows))


def table() -> None:
    """Prints one row per plan."""
    print(
        "| plan | weights | exchange | other | exchange | other | FLOPs at the peak | experts of it "
        "| MFU at most | exchange behind experts |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for layer in layers():
        seconds = (layer.exchange_s, layer.other_s, layer.flops_s, layer.routed_s)
        cells = (
            f"`{layer.plan}`",
            format_gib(layer.weights_bytes),
            format_bytes(layer.exchange_bytes),
            format_bytes(layer.other_bytes),
            *map(format_seconds, seconds),
            f"{layer.mfu:.0%}",
            f"{layer.overlapped_mfu:.0%}",
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    table()
