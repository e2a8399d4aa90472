"""Requests for an experiment: the options of predict, compile and run, typed and checked one by one."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from meshscope.api.options import (
    changed_options,
    choice,
    option,
    option_words,
    optional_path,
    request,
    text,
    text_or_number,
)
from meshscope.cost.expert_load import device_load, exchange_load
from meshscope.cost.predicted import with_default_chunk
from meshscope.errors import SpecError
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.model.quantization import (
    FP8_BLOCKS,
    UNQUANTIZED_DTYPE,
    activation_dtype_of,
    values_dtype,
    wide_format,
)
from meshscope.model.stored_format import weight_dtype_of
from meshscope.plans.caches import ContextForm
from meshscope.plans.checks import cut_block, has_program_format
from meshscope.plans.chunks import ChunkRule, chunk_option
from meshscope.plans.dispatch import DispatchForm, exchange_axes, gathered_ranks
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.kernel_choice import Kernels
from meshscope.plans.placement import parse_device_order
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.program import DEFAULT_FRONTEND, Engine, Frontend, Loop, Partitioner, Program
from meshscope.plans.workload import ACTIVATION_DTYPES, CACHE_DTYPES, Workload
from meshscope.programs.torchxla.configs import check_traceable
from meshscope.serialize import picked
from meshscope.store.folder import default_folder
from meshscope.units import dtype_name
from meshscope.workers import Progress

AUTO = "auto"  # weights in the format of the checkpoint, activations and KV cache in bf16
_DISPATCH = ("dispatch", "capacity_factor")


def check_no_idle_options(options: Mapping[str, Any], experiment: Experiment) -> None:
    """SpecError for the first of the given options that changes nothing in the experiment."""
    plan, program, form = experiment.plan, experiment.program, experiment.dispatch_form
    is_auto = program.partitioner is Partitioner.AUTO
    exchanges = is_auto or bool(exchange_axes(plan, form)) or gathered_ranks(plan, form) > 1
    is_split = plan.cp > 1
    loads = [
        load(experiment, phase)
        for phase in (experiment.phases if "routing_skew" in options else ())
        for load in (device_load, exchange_load)
    ]
    # Options, whether they change nothing, and why, as the end of a sentence.
    rules: tuple[tuple[tuple[str, ...], bool, str], ...] = (
        (("context",), not is_split, f"plan '{plan}' has no cp, which splits the sequence"),
        (
            ("context",),
            is_split and experiment.prefill_chunks.is_cut,
            "the chunks of a prompt gather queries over cp, not keys",
        ),
        (
            (*_DISPATCH, "routing_skew"),
            experiment.model.moe is None,
            f"{experiment.model.name} has no experts",
        ),
        (
            _DISPATCH,
            not exchanges,
            f"plan '{plan}' exchanges no rows of experts: it has no ep over dp or fsdp",
        ),
        (
            ("routing_skew",),
            plan.ep == 1,
            f"plan '{plan}' has no ep, so that every device has a part of every expert",
        ),
        (
            ("routing_skew",),
            all(load <= 1 for load in loads),
            "every device exchanges and computes a fixed number of rows, whatever the routing",
        ),
        (
            ("partitioner", "frontend", *_DISPATCH),
            experiment.engine is Engine.VLLM,
            "--engine vllm predicts the collectives of vLLM, not of a program of meshscope",
        ),
        (
            ("partitioner", "loop", "context", "kernels", *_DISPATCH),
            program.frontend.is_served,
            f"--frontend {program.frontend} compiles the engine's own program",
        ),
    )
    for names, is_idle, reason in rules:
        for name in names:
            if is_idle and name in options:
                raise idle_option(name, options[name], reason)


def check_prediction_options(loop: Loop) -> None:
    """SpecError for a loop, which only programs have."""
    if loop is not Loop.AUTO:
        reason = "a prediction has unrolled layers, as servers run them"
        raise idle_option("loop", loop, f"{reason}. Compile to see the other form")


def idle_option(option: str, value: object, reason: str) -> SpecError:
    """The refusal of an option without effect."""
    return SpecError(f"--{option.replace('_', '-')} {value} changes nothing: {reason}. Drop it.")


MAX_ORDER_WORD = 32
DTYPE_HELP = "Dtype of weights, activations and KV cache."

# Options that are fields of a program.
_PROGRAM_OPTIONS = (
    *("frontend", "partitioner", "loop", "context", "kernels", "dispatch"),
    *("capacity_factor", "microbatches"),
)


@request
class ExperimentRequest:
    """The options that predict, compile and run share, by the names that the command line uses."""

    model: str = option(
        "MODEL: A model id, a config.json, or a folder with one.", converter=text, kw_only=False
    )
    topology: str = option("SLICE: v6e-8, a chip grid v6e:2x4, or slices 2xv6e:4x4.")
    plan: str = option(
        "PLAN: tp=8, dp=2,tp=4, tp=8,sp, fsdp=-1; -1 fills; `meshscope plan` finds one."
    )
    batch: int = option("Sequences, over all devices.", default=1)
    prompt: int = option("Input tokens of a sequence.", default=128)
    output: int = option("Output tokens of a sequence.", default=128)
    dtype: str = option(
        f"DTYPE: {DTYPE_HELP} auto: weights as in the checkpoint, others bf16.", default=AUTO
    )
    weight_dtype: str | None = option(
        "DTYPE: Weight dtype, if different from --dtype: int8, fp8, awq, mxfp4, ...",
        default=None,
        flags=("--weight-dtype", "--quantization"),
    )
    cache_dtype: str | None = option(
        "DTYPE: KV cache dtype, if different from --dtype.",
        default=None,
        flags=("--cache-dtype", "--kv-cache-dtype"),
    )
    layers: int | None = option("N: Only the first N layers of the model.", default=None)
    engine: Engine = option(
        "Serving engine whose collectives to predict.",
        default=Engine.MESHSCOPE,
        converter=choice(Engine),
    )
    partitioner: Partitioner = option(
        "Who inserts the collectives: the program (manual) or the compiler (auto).",
        default=Partitioner.MANUAL,
        converter=choice(Partitioner),
    )
    frontend: Frontend = option(
        "Framework of the program.", default=DEFAULT_FRONTEND, converter=choice(Frontend)
    )
    loop: Loop = option(
        "Layers unrolled, or scanned as one loop body.", default=Loop.AUTO, converter=choice(Loop)
    )
    context: ContextForm = option(
        "How cp brings keys to queries in prefill.",
        default=ContextForm.AUTO,
        converter=choice(ContextForm),
    )
    kernels: Kernels = option(
        "Kernels where chip and shapes allow (auto), or none (off).",
        default=Kernels.AUTO,
        converter=choice(Kernels),
    )
    dispatch: DispatchForm = option(
        "How tokens reach experts on other devices.",
        default=DispatchForm.AUTO,
        converter=choice(DispatchForm),
    )
    capacity_factor: float | None = option(
        "X: Expert capacity over the mean load; tokens beyond it are dropped.", default=None
    )
    microbatches: int | None = option(
        "N: Micro-batches into which prefill splits a device's batch (pp).", default=None
    )
    prefill_chunk: str = option(
        "N|auto|off: Prompt tokens that prefill processes at a time on a data-parallel rank.",
        default=ChunkRule.AUTO.value,
        converter=text_or_number,
    )
    routing_skew: float = option(
        "X: Load of the most loaded device's experts over the mean, which sets the step time.",
        default=1.0,
    )
    device_order: str | None = option(
        "ORDER: Axes on the torus, such as y:dp=2,x:tp=4, or device ids in the order of the mesh.",
        default=None,
    )
    profile: Path | None = option(
        "FILE: Chip profile from calibrate, for times.", default=None, converter=optional_path
    )
    out: Path | None = option(
        "DIR: Folder of the run.", default=None, converter=optional_path, is_last=True
    )
    force: bool = option(
        "Replace an earlier run, once the new one is complete.", default=False, is_last=True
    )

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
        if self.has_program and self.dispatch in {DispatchForm.FUSED, DispatchForm.ALLGATHER}:
            raise SpecError(
                f"--dispatch {self.dispatch} is what serving engines do, and no program of meshscope does: only "
                "predict knows its time. Drop the option, or use meshscope predict."
            )
        chunk = chunk_option(self.prefill_chunk)
        model = read_model(self.model)
        slice_, plan = parse_topology(self.topology), parse_plan(self.plan)
        filled = plan.filled(slice_.n_devices)
        named = self.weight_dtype or self.dtype
        wide = UNQUANTIZED_DTYPE
        if self.dtype != AUTO:
            wide = dtype_name(self.dtype, ACTIVATION_DTYPES)
        is_wide, order = self.cache_dtype in {None, AUTO}, self.device_order
        experiment = experiment_of(
            model=model,
            plan=plan,
            topology=slice_,
            workload=Workload(
                **picked(self, "batch", "prompt", "output", "routing_skew"),
                weight_dtype=self._default_weights(model, filled)
                if named == AUTO
                else weight_dtype_of(model, named),
                activation_dtype=wide,
                cache_dtype=wide if is_wide else dtype_name(str(self.cache_dtype), CACHE_DTYPES),
                prefill_chunk=None if isinstance(chunk, ChunkRule) else chunk,
            ),
            program=Program(**picked(self, *_PROGRAM_OPTIONS)),
            engine=self.engine,
            n_layers=self.layers,
            device_order=None if order is None else parse_device_order(order, filled.mesh, slice_),
        )
        check_no_idle_options(changed_options(self), experiment)
        if self.frontend.is_traced:
            check_traceable(experiment)
        is_auto = self.prefill_chunk == ChunkRule.AUTO
        return with_default_chunk(experiment) if is_auto else experiment

    def _default_weights(self, model: Model, plan: Plan) -> str:
        """The weight dtype of the checkpoint, or of its program."""
        stored, frontend = model.default_weight_dtype, self.frontend
        is_manual = self.partitioner is Partitioner.MANUAL
        lacks_program = not has_program_format(model, plan, stored, self.partitioner)
        if frontend.is_traced:
            is_stored = stored == FP8_BLOCKS and cut_block(plan, model, stored) is None
            return stored if is_stored else UNQUANTIZED_DTYPE
        if self.has_program and lacks_program:
            return UNQUANTIZED_DTYPE
        is_narrow = activation_dtype_of(stored) is not None
        is_ours = frontend.is_own and self.engine is Engine.MESHSCOPE
        has_narrow = is_ours and is_manual and self.dispatch is not DispatchForm.FUSED
        assumed = wide_format(stored) if is_narrow and not has_narrow else stored
        is_of_layers = assumed == wide_format(assumed)
        return values_dtype(assumed) if frontend.is_served and is_of_layers else assumed

    @property
    def has_default_weights(self) -> bool:
        """Whether no option names the weight dtype."""
        return (self.weight_dtype or self.dtype) == AUTO


@request
class PredictRequest(ExperimentRequest):
    """The options of `predict` that other commands do not share."""

    server: str | None = option(
        "ENGINE[@VERSION]: Serving engine, vllm-tpu or sglang-jax: its scheduler, buckets and host time.",
        default=None,
        shown="an ideal engine",
    )
    speculate: str | None = option(
        "METHOD:k=N,acceptance=X: Speculative decoding by mtp, dspark, eagle or draft:MODEL, e.g. "
        "mtp:k=1,acceptance=0.85.",
        default=None,
    )


@request
class CompileRequest(ExperimentRequest):
    """The options of `compile`."""

    has_program: ClassVar[bool] = True
    takes_engines: ClassVar[bool] = True
    engine_version: str | None = option(
        "V: Release of the engine; by default the newest one installed.", default=None
    )
    compiler: str | None = option(
        "NAME: Another version of JAX and libtpu, from meshscope compilers list.", default=None
    )
    speculate: str | None = option(PredictRequest, default=None)
    progress: Progress | None = option(
        "Called with a part of the work, its step, and the seconds left or None.",
        default=None,
        is_for_python=True,
        is_last=True,
    )


def _dtype_or_default(value: str | None) -> str:
    return "" if value is None else text(value)


@request
class LiveRequest(ExperimentRequest):
    """The options of `run`. An empty `dtype` is f32 on a CPU and `auto` elsewhere."""

    has_program: ClassVar[bool] = True
    dtype: str = option(
        DTYPE_HELP,
        default="",
        metavar="DTYPE",
        shown="f32 on CPU, auto elsewhere",
        converter=_dtype_or_default,
    )
    repeats: int = option("N: Timed requests.", default=3, least=1)
    warmup: int = option("N: Untimed requests before them.", default=1, least=1)
    profiled_steps: int = option(
        "N: Decode steps in the profile, after the timed requests.", default=4, least=1
    )
    checkpoint: Path | None = option(
        "DIR: Weights and tokenizer in Hugging Face's format.",
        default=None,
        converter=optional_path,
    )
    prompt_text: str | None = option(
        "TEXT: Prompt of every sequence, for the checkpoint's tokenizer.", default=None
    )
    speculate: str | None = option(PredictRequest, default=None)
    coordinator: str | None = option(
        "HOST:PORT: Address of process 0, if several processes run together.", default=None
    )
    process_id: int = option(
        "I: Number of this process; process 0 writes the run.", default=0, least=0
    )
    n_processes: int = option("N: Number of processes.", default=1, least=1)
    seed: int = option("Seed of random weights and prompts.", default=0, least=0)
    progress: Progress | None = option(CompileRequest, default=None)


def command_line(command: str, asked: ExperimentRequest) -> tuple[str, ...]:
    """The command that makes the run of this request."""
    options = {**changed_options(asked), "out": asked.out}
    return ("meshscope", command, *option_words(options))


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
    "speculate": "{}",
}


def run_folder(asked: ExperimentRequest, experiment: Experiment) -> Path:
    """`--out`, or `runs/<model>-<slice>-<plan>` with the options that are not defaults."""
    if asked.out is not None:
        return asked.out
    program, workload, changed = experiment.program, experiment.workload, changed_options(asked)
    chunk = f"chunk{workload.prefill_chunk}" if workload.prefill_chunk else "unchunked"
    order = re.sub(r"[:=]", "", asked.device_order or "")
    if len(order) > MAX_ORDER_WORD:
        order = f"devices{hashlib.sha256(order.encode()).hexdigest()[:8]}"
    return default_folder(
        experiment.model.name.rsplit("/", 1)[-1],
        experiment.topology.name,
        str(experiment.plan).replace("=", ""),
        *(form.format(changed[n]) for n, form in _NAME_WORDS.items() if n in changed),
        "" if program.frontend.is_own else program.frontend,
        program.engine_version or "",
        "auto" if program.partitioner is Partitioner.AUTO else "",
        "scan" if program.loop is Loop.SCAN else "",
        "" if program.context is ContextForm.AUTO else program.context,
        "plain" if program.kernels is Kernels.OFF else "",
        "" if program.dispatch is DispatchForm.AUTO else program.dispatch.value,
        "" if program.microbatches is None else f"microbatches{program.microbatches}",
        "" if with_default_chunk(experiment).workload == workload else chunk,
        order,
    )
