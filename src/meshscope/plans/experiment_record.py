"""The experiment of a stored run: every field typed, None if the run does not know it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from typing import Any, get_type_hints

from meshscope.errors import read_only
from meshscope.events.enums import Phase
from meshscope.hardware.chips import Chip
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.layers import LIMITS, SHARED_CACHE
from meshscope.model.mechanisms.mixture import Activation
from meshscope.model.model import Model
from meshscope.plans.caches import ContextForm
from meshscope.plans.chunks import PrefillChunks
from meshscope.plans.dispatch import Dispatch, DispatchForm
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.program import Engine, Program
from meshscope.plans.workload import Workload
from meshscope.serialize import FormatError, from_plain, picked, to_plain


class LayerForm(StrEnum):
    """How the compiled program writes its layers: one loop body, or one after the other."""

    SCANNED = "scanned"
    UNROLLED = "unrolled"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model known only by its name and perhaps its number of layers."""

    name: str
    n_layers: int | None = None


@dataclass(frozen=True, slots=True)
class ReceivedBytes:
    """Bytes that one layer's dispatch brings to one device, by the skew of the routing."""

    balanced: float
    skewed: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseDispatch:
    """The dispatch of one layer in one phase, on one device (see `plans.dispatch.Dispatch`)."""

    form: DispatchForm
    axes: tuple[str, ...]
    n_ranks: int
    n_tokens: int
    n_rows: int
    n_buffer_rows: int
    n_slots: int | None
    n_expert_slots: int | None = None
    n_worst_dropped_rows: int
    received_bytes: ReceivedBytes


def phase_dispatch(dispatch: Dispatch, *, row_bytes: int, skew: float) -> PhaseDispatch:
    """The facts of a dispatch, with the bytes of rows that are `row_bytes` each."""
    received = (dispatch.received_rows(1.0), dispatch.received_rows(skew), dispatch.n_most_rows)
    names = ("form", "axes", "n_ranks", "n_tokens", "n_rows", "n_buffer_rows")
    return PhaseDispatch(
        **picked(dispatch, *names, "n_slots", "n_expert_slots"),
        n_worst_dropped_rows=dispatch.n_worst_dropped,
        received_bytes=ReceivedBytes(*(float(n_rows * row_bytes) for n_rows in received)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRecord:
    """The dispatch that the program writes, by phase, or the form of one whose collectives the compiler chooses."""

    routing_skew: float | None = None
    prefill: PhaseDispatch | None = None
    decode: PhaseDispatch | None = None
    form: DispatchForm | None = None
    by: str | None = None

    @property
    def by_phase(self) -> dict[Phase, PhaseDispatch]:
        """The phases that dispatch rows."""
        phases = {Phase.PREFILL: self.prefill, Phase.DECODE: self.decode}
        return {phase: facts for phase, facts in phases.items() if facts is not None}


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRecord:
    """What a run was asked for. An imported run knows no model or workload; a compiled function is the name of its model."""

    model: Model | NamedModel | None = None
    plan: Plan | None = None
    mesh: Mapping[str, int] = field(default_factory=dict[str, int])
    topology: Topology | None = None
    n_devices: int | None = None
    n_chips: int | None = None
    workload: Workload | None = None
    program: Program | None = None
    layers_are: LayerForm | None = None
    microbatches: Mapping[Phase, int] = field(default_factory=dict[Phase, int])
    prefill_chunks: PrefillChunks | None = None  # None in runs of older versions
    kernels: Mapping[str, str] = field(default_factory=dict[str, str])  # by part of the program
    context: ContextForm | None = None  # None without cp
    engine: Engine | None = None
    dispatch: DispatchRecord | None = None  # None if no row travels to an expert
    imported: tuple[str, ...] | None = None  # paths of the HLO text; None unless imported
    phase: Phase | None = None  # of imported HLO text whose scopes name none
    function: str | None = None  # file:line of the user's function that was compiled
    device_order: tuple[int, ...] | None = None  # device at each mesh position; None: 0, 1, 2, ...
    # By file in hlo/, in the order of a step; None unless the user says which programs make a step.
    program_phases: Mapping[str, Phase | None] | None = None
    extended_layers: int | None = None  # that an imported program is extended to
    lengths: str | None = None  # sequences of a step, as typed, of an imported program

    @property
    def device_mesh(self) -> Mesh:
        """The mesh over the devices of the slice; without axes if the run knows none."""
        return Mesh(axes=tuple(self.mesh.items()), order=self.device_order)

    @property
    def layout(self) -> str | None:
        """The plan as typed, such as `tp=8`; for a mesh of the user's axes, such as `data=8,model=8`."""
        if self.plan is not None:
            return str(self.plan)
        return ",".join(f"{name}={size}" for name, size in self.mesh.items()) or None

    @property
    def weight_dtype(self) -> str | None:
        """The format of the weights; None if the run knows no workload."""
        return None if self.workload is None else self.workload.weight_dtype

    @property
    def model_name(self) -> str | None:
        """The model's id or config path."""
        return None if self.model is None else self.model.name

    @property
    def n_layers(self) -> int | None:
        """Layers of the model, after `--layers`."""
        return None if self.model is None else self.model.n_layers

    @property
    def architecture(self) -> Model | None:
        """The model with all its sizes; None if at most its name is known."""
        return self.model if isinstance(self.model, Model) else None

    @property
    def chip(self) -> Chip | None:
        """The chip of the slice."""
        return None if self.topology is None else self.topology.chip

    def as_dict(self) -> dict[str, Any]:
        """Plain values for manifest.json and --json; an imported run has only the keys it knows."""
        stored: dict[str, Any] = {f.name: to_plain(getattr(self, f.name)) for f in fields(self)}
        stored["model"] = None if self.model is None else model_as_dict(self.model)
        stored["plan"] = None if self.plan is None else str(self.plan)
        stored["topology"] = None if self.topology is None else self.topology.name
        if self.workload is not None and self.workload.decode_tokens == 1:
            del stored["workload"]["decode_tokens"]
        if self.dispatch is not None:
            stored["dispatch"] = {k: v for k, v in stored["dispatch"].items() if v is not None}
        if self.imported is not None or self.function is not None:
            names = _IMPORTED if self.imported is not None else _FUNCTION
            return {name: stored[name] for name in names if stored[name] is not None}
        left_out = (*_IMPORT_ONLY, *(["device_order"] if self.device_order is None else []))
        return {name: value for name, value in stored.items() if name not in left_out}


_OF_IMPORTS = ("program_phases", "extended_layers", "lengths")
_IMPORT_ONLY = ("imported", "phase", "function", *_OF_IMPORTS)
_FUNCTION = ("model", "function", "mesh", "topology", "n_devices", "n_chips", "phase")
_IMPORTED = (
    *("imported", "model", "plan", "mesh", "topology", "n_devices", "n_chips", "phase"),
    "device_order",
    *_OF_IMPORTS,
)


def record_from_dict(values: Mapping[str, Any]) -> ExperimentRecord:
    """The record that `as_dict`, perhaps of an older version, wrote; FormatError or MeshscopeError for a wrong value."""
    kinds: dict[str, Any] = get_type_hints(ExperimentRecord) | {"plan": str, "topology": str}
    stored = {name: values[name] for name in kinds if values.get(name) is not None}
    model = stored.pop("model", None)
    parsed = {name: from_plain(kinds[name], v, f"experiment.{name}") for name, v in stored.items()}
    parsers = {"plan": parse_plan, "topology": partial(parse_topology, is_imported=True)}
    parsed |= {name: parse(parsed[name]) for name, parse in parsers.items() if name in parsed}
    return ExperimentRecord(model=None if model is None else model_from_dict(model), **parsed)


def model_as_dict(model: Model | NamedModel) -> dict[str, Any]:
    """The model as plain values; a layer is the name of its kind, e.g. `full/moe`."""
    if isinstance(model, NamedModel):
        return to_plain(model)
    layers = [layer.name for layer in model.layers]
    stored = to_plain(model) | {"n_layers": model.n_layers, "layers": layers}
    for name in ("draft_head", "engram", "drafts", "images"):
        if stored[name] is None:
            del stored[name]
    return stored


def model_from_dict(values: Mapping[str, Any]) -> Model | NamedModel:
    """The model that `model_as_dict` wrote; FormatError or SpecError for anything else."""
    path = "experiment.model"
    stored = from_plain(dict[str, Any], values, path)
    if "family" not in stored:
        return from_plain(NamedModel, stored, path)
    stored.pop("n_layers", None)
    if stored.pop("has_gated_mlp", True) is False:  # as runs until November 2026 say it
        stored["activation"] = Activation.XIELU.value
    layers: list[dict[str, Any]] = []
    for name in from_plain(list[str], stored.get("layers"), f"{path}.layers"):
        attention, *others = name.replace(SHARED_CACHE, "").split("/")
        if not others:
            raise FormatError(
                f"{path}.layers: expected a kind such as 'full/moe', got {name[:40]!r}"
            )
        kinds = {"attention": attention, "mlp": others[0], "shares_cache": SHARED_CACHE in name}
        parts = [one.split("=") for one in others[1:]]
        try:
            limits = {one[0]: float(one[-1]) for one in parts if one[0] in LIMITS}
        except ValueError as error:
            raise FormatError(f"{path}.layers: no number in {name[:40]!r}") from error
        formats = [one for one in parts if one[0] not in LIMITS]
        layers.append(kinds | {"formats": formats, "limits": [limits.get(x) for x in LIMITS]})
    return from_plain(Model, stored | {"layers": layers}, path)
