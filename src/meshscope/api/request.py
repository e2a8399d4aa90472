"""Requests for an experiment: the options of predict, compile and run, typed and checked one by one."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_type_hints

from meshscope.api.idle_options import check_no_idle_options
from meshscope.backends.compile.cycles import Cycles
from meshscope.cost.default_chunk import with_default_chunk
from meshscope.errors import NUMBERS, SpecError, nearest, number_of
from meshscope.files import path_of
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.interconnect.placement import parse_device_order
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.model.quantization import (
    UNQUANTIZED_DTYPE,
    activation_dtype_of,
    values_dtype,
    wide_format,
)
from meshscope.model.stored_format import weight_dtype_of
from meshscope.plans.chunks import ChunkRule, chunk_option
from meshscope.plans.context_form import ContextForm
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.kernel_choice import Kernels
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.program import DEFAULT_FRONTEND, Engine, Frontend, Loop, Partitioner, Program
from meshscope.plans.program_formats import has_program_format
from meshscope.plans.workload import Workload
from meshscope.programs.torchxla.checks import check_traceable
from meshscope.serialize import picked
from meshscope.store.folder import default_folder
from meshscope.units import dtype_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")

MAX_ORDER_WORD = 32
AUTO = "auto"  # weights in the format of the checkpoint, activations and KV cache in bf16

# Options that are fields of a program.
_PROGRAM_OPTIONS = (
    *("frontend", "partitioner", "loop", "context", "kernels", "dispatch"),
    *("capacity_factor", "microbatches"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRequest:
    """The options that predict, compile and run share, by the names that the command line uses."""

    model: str
    topology: str
    plan: str
    batch: int = 1
    prompt: int = 128
    output: int = 128
    dtype: str = AUTO
    weight_dtype: str | None = None
    cache_dtype: str | None = None
    layers: int | None = None
    engine: Engine = Engine.MESHSCOPE
    partitioner: Partitioner = Partitioner.MANUAL
    frontend: Frontend = DEFAULT_FRONTEND
    loop: Loop = Loop.AUTO
    context: ContextForm = ContextForm.AUTO
    kernels: Kernels = Kernels.AUTO
    dispatch: DispatchForm = DispatchForm.AUTO
    capacity_factor: float | None = None
    microbatches: int | None = None
    prefill_chunk: str = ChunkRule.AUTO.value
    routing_skew: float = 1.0
    device_order: str | None = None
    profile: Path | None = None

    # Whether a program is built, which lacks some formats of weights.
    has_program: ClassVar[bool] = False
    # Whether a serving engine's own model code may be the program.
    takes_engines: ClassVar[bool] = False

    def experiment(self) -> Experiment:
        """The checked experiment; a MeshscopeError for an impossible one."""
        if self.frontend.is_served and not self.takes_engines:
            raise SpecError(
                f"--frontend {self.frontend} compiles the engine's own programs, which only compile can "
                "do. Drop the option, or use meshscope compile."
            )
        if self.has_program and self.dispatch is DispatchForm.FUSED:
            raise SpecError(
                "--dispatch fused is a kernel of serving engines, which no program of meshscope has: only "
                "predict knows its time. Drop the option, or use meshscope predict."
            )
        chunk = chunk_option(self.prefill_chunk)
        model = read_model(self.model)
        topology = parse_topology(self.topology)
        plan = parse_plan(self.plan)
        wide = dtype_name(UNQUANTIZED_DTYPE if self.dtype == AUTO else self.dtype)
        experiment = experiment_of(
            model=model,
            plan=plan,
            topology=topology,
            workload=Workload(
                batch=self.batch,
                prompt=self.prompt,
                output=self.output,
                weight_dtype=self._weight_dtype(model, plan.filled(topology.n_devices)),
                activation_dtype=wide,
                cache_dtype=self._cache_dtype(wide),
                routing_skew=self.routing_skew,
                prefill_chunk=None if isinstance(chunk, ChunkRule) else chunk,
            ),
            program=Program(**picked(self, *_PROGRAM_OPTIONS)),
            engine=self.engine,
            n_layers=self.layers,
            device_order=self._device_order(plan, topology),
        )
        check_no_idle_options(changed_options(self), experiment)
        if self.frontend.is_traced:
            check_traceable(experiment)
        return with_default_chunk(experiment) if chunk is ChunkRule.AUTO else experiment

    def _device_order(self, plan: Plan, topology: Topology) -> tuple[int, ...] | None:
        if self.device_order is None:
            return None
        return parse_device_order(self.device_order, plan.filled(topology.n_devices).mesh, topology)

    def _cache_dtype(self, wide: str) -> str:
        """The dtype of the KV cache, by default that of activations."""
        if self.cache_dtype is None or self.cache_dtype == AUTO:
            return wide
        return dtype_name(self.cache_dtype)

    @property
    def has_default_weights(self) -> bool:
        """Whether no option names the weight dtype."""
        return (self.weight_dtype or self.dtype) == AUTO

    def _weight_dtype(self, model: Model, plan: Plan) -> str:
        """The weight dtype that the options name, else that of the checkpoint or of a program for it."""
        if not self.has_default_weights:
            return weight_dtype_of(model, self.weight_dtype or self.dtype)
        stored = model.default_weight_dtype
        lacks_program = not has_program_format(model, plan, stored, self.partitioner)
        if self.frontend.is_traced or (self.has_program and lacks_program):
            return UNQUANTIZED_DTYPE
        is_narrow = activation_dtype_of(stored) is not None
        is_ours = self.frontend.is_own and self.engine is Engine.MESHSCOPE
        is_fused = self.dispatch is DispatchForm.FUSED
        has_narrow = is_ours and self.partitioner is Partitioner.MANUAL and not is_fused
        assumed = wide_format(stored) if is_narrow and not has_narrow else stored
        is_of_layers = assumed == wide_format(assumed)
        return values_dtype(assumed) if self.frontend.is_served and is_of_layers else assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictRequest(ExperimentRequest):
    """The options of `predict` alone, beside those that all commands share."""

    speculate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest(ExperimentRequest):
    """The options of `compile`."""

    has_program: ClassVar[bool] = True
    takes_engines: ClassVar[bool] = True
    cycles: Cycles = Cycles.ESTIMATED
    engine_version: str | None = None
    compiler: str | None = None
    training: bool = False
    speculate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest(ExperimentRequest):
    """The options of `run`. An empty `dtype` is f32 on a CPU and `auto` elsewhere."""

    has_program: ClassVar[bool] = True
    dtype: str = ""
    repeats: int = 3
    warmup: int = 1
    profiled_steps: int = 4
    checkpoint: Path | None = None
    prompt_text: str | None = None
    speculate: str | None = None
    coordinator: str | None = None
    process_id: int = 0
    n_processes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Counts are in range."""
        for name, least in (
            ("repeats", 1),
            ("warmup", 1),
            ("profiled_steps", 1),
            ("process_id", 0),
            ("n_processes", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise SpecError(f"{name}={getattr(self, name)} is too small. Use {least} or more.")


def request_of(kind: type[R], values: Mapping[str, Any]) -> R:
    """The request with these option values; SpecError for a value of the wrong type.

    `values` may hold other names, which are ignored. Enum options accept their values as strings.
    """
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind) if field.name in values}
    return kind(**{name: _typed(name, values[name], hints[name]) for name in known})


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value as the type of its option."""
    if isinstance(hint, UnionType):
        if value is None:
            return None
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    if issubclass(hint, StrEnum):
        if value not in set(hint):
            raise SpecError(f"{name}: '{value}' is not one of {', '.join(hint)}.")
        return hint(value)
    if hint is Path:
        return path_of(value)
    if hint is str and isinstance(value, str | Path):
        return str(value)
    if name == "prefill_chunk":
        hint = int
    if hint not in NUMBERS:
        raise SpecError(f"{name}: {value!r} must be {'text' if hint is str else hint.__name__}.")
    number = number_of(name, value, hint)
    return str(number) if name == "prefill_chunk" else number


def changed_options(request: ExperimentRequest) -> dict[str, Any]:
    """The options that differ from their defaults, in the order of the command line."""
    return {
        field.name: getattr(request, field.name)
        for field in fields(request)
        if not _is_default(field, getattr(request, field.name))
    }


def _is_default(field: "Field[Any]", value: Any) -> bool:
    return field.default is not MISSING and field.default == value


def option_words(options: Mapping[str, Any]) -> Iterator[str]:
    """The options as command-line words; `model` is the positional argument."""
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if name == "model":
            yield str(value)
        elif value is True:
            yield option
        elif value is None or value is False:
            continue
        elif str(value).startswith("-"):
            yield f"{option}={value}"  # in one word, as the value looks like an option
        else:
            yield from (option, str(value))


def command_line(
    command: str, request: ExperimentRequest, *, out: Path | None = None
) -> tuple[str, ...]:
    """The command that makes the run of this request."""
    options = {**changed_options(request), "out": out}
    return ("meshscope", command, *option_words(options))


def known_option(name: str, names: list[str], where: str) -> None:
    """SpecError with the nearest names unless `name` is an option of `where`."""
    if name not in names:
        raise SpecError(f"'{name}' is not an option of {where}. {nearest(name, names)}")


def _chunk_word(experiment: Experiment) -> str:
    """The prefill chunk in the name of a folder; empty for the default."""
    workload = experiment.workload
    if with_default_chunk(experiment).workload == workload:
        return ""
    return "unchunked" if workload.prefill_chunk is None else f"chunk{workload.prefill_chunk}"


# Options in the name of a folder if they are not the defaults, and how their values are written.
_NAME_WORDS: dict[str, str] = {
    "layers": "{}layers",
    "batch": "batch{}",
    "prompt": "prompt{}",
    "output": "output{}",
    "dtype": "{}",
    "weight_dtype": "weights-{}",
    "cache_dtype": "cache-{}",
    "capacity_factor": "capacity{}",
    "routing_skew": "skew{}",
    "compiler": "{}",
    "training": "training",
    "speculate": "{}",
}


def run_folder(request: ExperimentRequest, experiment: Experiment, out: Path | None) -> Path:
    """`out`, or `runs/<model>-<slice>-<plan>` with the options that are not defaults."""
    if out is not None:
        return out
    program = experiment.program
    changed = changed_options(request)
    workload = [form.format(changed[n]) for n, form in _NAME_WORDS.items() if n in changed]
    return default_folder(
        experiment.model.name.rsplit("/", 1)[-1],
        experiment.topology.name,
        str(experiment.plan).replace("=", ""),
        *workload,
        "" if program.frontend.is_own else program.frontend,
        program.engine_version or "",
        "auto" if program.partitioner is Partitioner.AUTO else "",
        "scan" if program.loop is Loop.SCAN else "",
        "" if program.context is ContextForm.AUTO else program.context,
        "plain" if program.kernels is Kernels.OFF else "",
        "" if program.dispatch is DispatchForm.AUTO else program.dispatch.value,
        "" if program.microbatches is None else f"microbatches{program.microbatches}",
        _chunk_word(experiment),
        _order_word(request.device_order),
    )


def _order_word(device_order: str | None) -> str:
    """The order of devices in the name of a folder; a digest of a long one."""
    if device_order is None:
        return ""
    text = re.sub(r"[:=]", "", device_order)
    if len(text) > MAX_ORDER_WORD:
        text = f"devices{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return text
