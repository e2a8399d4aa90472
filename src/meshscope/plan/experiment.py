"""One experiment: a model, a plan, a slice, a workload and a program, checked against each other."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from meshscope.arch.model import Family, GroupedAttention, Model, Rope, RopeType
from meshscope.errors import PlanError, SpecError
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plan.mesh import Groups
from meshscope.plan.plan import AXES, Plan, check_batch, check_model, parse_plan
from meshscope.plan.workload import Workload
from meshscope.table.kinds import Phase


class Frontend(StrEnum):
    """Who writes the program."""

    JAX = "jax"
    TORCHXLA = "torchxla"


class Partitioner(StrEnum):
    """Who inserts the collectives: we (`manual`), or the compiler from annotations (`auto`)."""

    MANUAL = "manual"
    AUTO = "auto"


class Loop(StrEnum):
    """How layers are written: one after the other, or one body in a loop."""

    AUTO = "auto"
    UNROLL = "unroll"
    SCAN = "scan"


class Engine(StrEnum):
    """Whose conventions the prediction follows: our programs, or vLLM's as the paper measured them."""

    MESHSCOPE = "meshscope"
    VLLM = "vllm"


# The axes that each engine's predictions, and the programs, have today.
SUPPORTED: dict[Engine, tuple[str, ...]] = {
    Engine.MESHSCOPE: ("tp", "sp", "dp", "fsdp"),
    Engine.VLLM: ("tp", "pp"),
}


# Unrolled, a layer of a 32B model costs the compiler one to two seconds; scanned layers cost it
# once. Both count alike, so `--loop auto` unrolls only as many as compile in seconds.
MAX_UNROLLED_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Which of the programs of a model is meant."""

    frontend: Frontend = Frontend.JAX
    partitioner: Partitioner = Partitioner.MANUAL
    loop: Loop = Loop.AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What a user asks for; a built one is consistent (see `experiment_of`)."""

    model: Model
    plan: Plan
    topology: Topology
    workload: Workload
    program: Program
    engine: Engine = Engine.MESHSCOPE

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Prefill, and decode when the request makes more than one token."""
        has_decode = self.workload.n_decode_steps > 0
        return (Phase.PREFILL, Phase.DECODE) if has_decode else (Phase.PREFILL,)

    @property
    def is_scanned(self) -> bool:
        """Whether the layers are one loop body."""
        match self.program.loop:
            case Loop.SCAN:
                return True
            case Loop.UNROLL:
                return False
            case Loop.AUTO:
                return self.model.n_layers > MAX_UNROLLED_LAYERS

    def crosses_slices(self, groups: Groups) -> bool | None:
        """Whether a group spans slices, over DCN; None on a single slice."""
        return self.topology.crosses_slices(groups)

    def as_dict(self) -> dict[str, Any]:
        """The experiment as plain values, for manifest.json and --json."""
        return {
            "model": asdict(self.model),
            "plan": str(self.plan),
            "mesh": dict(self.plan.mesh.axes),
            "topology": self.topology.name,
            "n_devices": self.topology.n_devices,
            "n_chips": self.topology.n_chips,
            "workload": asdict(self.workload),
            "program": asdict(self.program),
            "layers_are": "scanned" if self.is_scanned else "unrolled",
            "engine": self.engine.value,
        }


def experiment_from_dict(values: Mapping[str, Any]) -> Experiment:
    """The experiment that `Experiment.as_dict` wrote; SpecError when a value is missing or foreign."""
    try:
        model = dict(values["model"])
        attention = dict(model.pop("attention"))
        rope = dict(attention.pop("rope"))
        rope["rope_type"] = RopeType(rope["rope_type"])
        model["family"] = Family(model["family"])
        program = values["program"]
        return Experiment(
            model=Model(**model, attention=GroupedAttention(**attention, rope=Rope(**rope))),
            plan=parse_plan(values["plan"]),
            topology=parse_topology(values["topology"]),
            workload=Workload(**values["workload"]),
            program=Program(
                frontend=Frontend(program["frontend"]),
                partitioner=Partitioner(program["partitioner"]),
                loop=Loop(program["loop"]),
            ),
            engine=Engine(values["engine"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"the stored experiment is not understood: {error!r}. Make the run again."
        ) from error


def experiment_of(  # noqa: PLR0913  the five types and the engine
    *,
    model: Model,
    plan: Plan,
    topology: Topology,
    workload: Workload,
    program: Program | None = None,
    engine: Engine = Engine.MESHSCOPE,
    n_layers: int | None = None,
) -> Experiment:
    """The checked experiment: plan filled to the slice, model cut to `n_layers`."""
    if n_layers is not None:
        if not 1 <= n_layers <= model.n_layers:
            raise SpecError(
                f"--layers {n_layers}: {model.name} has {model.n_layers} layers. Use 1 to {model.n_layers}."
            )
        model = replace(model, n_layers=n_layers)
    plan = plan.filled(topology.n_devices)
    if model.max_position is not None and workload.context > model.max_position:
        raise SpecError(
            f"prompt={workload.prompt} and output={workload.output} need {workload.context} positions; "
            f"{model.name} has max_position_embeddings={model.max_position}. Shorten one of them."
        )
    _check_supported(plan, engine)
    check_batch(plan, workload)
    check_model(plan, model)
    return Experiment(
        model=model,
        plan=plan,
        topology=topology,
        workload=workload,
        program=program or Program(),
        engine=engine,
    )


def _check_supported(plan: Plan, engine: Engine) -> None:
    """PlanError when the plan uses an axis that the engine does not have."""
    used = [axis for axis in AXES if getattr(plan, axis) != 1] + ["sp"] * plan.sp
    for axis in used:
        if axis not in SUPPORTED[engine]:
            others = [f", or --engine {e} for {axis}" for e in Engine if axis in SUPPORTED[e]]
            raise PlanError(
                f"plan '{plan}': --engine {engine} does not have {axis} yet. "
                f"Use {', '.join(SUPPORTED[engine])}{''.join(others)}."
            )
