"""Options that several commands share, and the experiment that they describe."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from meshscope.cli.profiles import ProfileOption
from meshscope.spec.experiment import Experiment, experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.context_form import ContextForm
from meshscope.spec.plan.dispatch import DispatchForm
from meshscope.spec.plan.kernel_choice import Kernels
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.program import Engine, Frontend, Loop, Partitioner, Program
from meshscope.spec.workload import Workload
from meshscope.store.folder_names import default_folder
from meshscope.units import dtype_name

TopologyOption = Annotated[
    str,
    typer.Option(
        "--topology", metavar="SLICE", help="v6e-8, a chip grid v6e:2x4, or slices 2xv6e:4x4."
    ),
]
PlanOption = Annotated[
    str, typer.Option("--plan", metavar="PLAN", help="tp=8, dp=2,tp=4, tp=8,sp, fsdp=-1; -1 fills.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="The folder of the run.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace the run in this folder, once the new one is whole.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentOptions:
    """What the user asks for, as typed; each field is an argument or option of the command."""

    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model id, a config.json, or a folder with one."),
    ]
    topology: TopologyOption
    plan: PlanOption
    batch: Annotated[int, typer.Option(help="Sequences, over all devices.")] = 1
    prompt: Annotated[int, typer.Option(help="Tokens in, a sequence.")] = 128
    output: Annotated[int, typer.Option(help="Tokens out, a sequence.")] = 128
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Of weights, activations and cache.")
    ] = "bf16"
    weight_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Of weights, where it differs.")
    ] = None
    cache_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Of the KV cache, where it differs.")
    ] = None
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Only the first N layers of the model.")
    ] = None
    engine: Annotated[Engine, typer.Option(help="Whose conventions to predict.")] = Engine.MESHSCOPE
    partitioner: Annotated[
        Partitioner,
        typer.Option(help="Who inserts the collectives: the program, or the compiler."),
    ] = Partitioner.MANUAL
    frontend: Annotated[Frontend, typer.Option(help="Who writes the program.")] = Frontend.JAX
    loop: Annotated[
        Loop, typer.Option(help="Layers one after the other, or one body in a loop.")
    ] = Loop.AUTO
    context: Annotated[
        ContextForm, typer.Option(help="How cp brings keys to queries in prefill.")
    ] = ContextForm.AUTO
    kernels: Annotated[
        Kernels,
        typer.Option(help="Kernels where chip and shapes allow, or refuse (on), or plain (off)."),
    ] = Kernels.AUTO
    dispatch: Annotated[
        DispatchForm, typer.Option(help="How tokens reach experts on other devices.")
    ] = DispatchForm.AUTO
    capacity_factor: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Room for X times the mean of tokens; beyond, tokens are dropped."
        ),
    ] = None
    microbatches: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="In prefill, parts of a device's batch in the pipeline (pp)."
        ),
    ] = None
    routing_skew: Annotated[
        float,
        typer.Option(metavar="X", help="Load of the most loaded device's experts over the mean."),
    ] = 1.0
    profile: ProfileOption = None
    out: OutOption = None
    force: ForceOption = False
    as_json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions(ExperimentOptions):
    """What the user asks of live devices, as typed."""

    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="Of weights, activations and cache.",
            show_default="f32 on CPU, bf16 elsewhere",
        ),
    ] = ""
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that are timed.")] = 3
    warmup: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests before them that are not.")
    ] = 1
    profiled_steps: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Decode steps that are profiled, after those timed."),
    ] = 4
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Weights and tokenizer, as Hugging Face writes them."),
    ] = None
    prompt_text: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The prompt of every sequence, for the checkpoint."),
    ] = None
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Process 0, where several processes run together."),
    ] = None
    process_id: Annotated[
        int, typer.Option(metavar="I", min=0, help="Which of them this is; 0 writes the run.")
    ] = 0
    n_processes: Annotated[int, typer.Option(metavar="N", min=1, help="How many they are.")] = 1
    seed: Annotated[int, typer.Option(min=0, help="Of random weights and prompts.")] = 0


def takes_experiment(command: Callable[[ExperimentOptions], None]) -> Callable[..., None]:
    """The command with the fields of ExperimentOptions as its arguments and options, for typer."""
    return takes_options(command, ExperimentOptions)


def takes_options(command: Callable[[Any], None], options: type[Any]) -> Callable[..., None]:
    """The command with the fields of this dataclass as its arguments and options, for typer."""

    def with_options(**values: Any) -> None:
        command(options(**values))

    hints = get_type_hints(options, include_extras=True)
    with_options.__doc__ = command.__doc__
    with_options.__annotations__ = hints
    with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  typer reads it
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=hints[field.name],
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
            )
            for field in fields(options)
        ]
    )
    return with_options


def asked_experiment(options: ExperimentOptions) -> Experiment:
    """The checked experiment; every complaint is a MeshscopeError."""
    return experiment_of(
        model=read_model(options.model),
        plan=parse_plan(options.plan),
        topology=parse_topology(options.topology),
        workload=Workload(
            batch=options.batch,
            prompt=options.prompt,
            output=options.output,
            weight_dtype=dtype_name(options.weight_dtype or options.dtype),
            activation_dtype=dtype_name(options.dtype),
            cache_dtype=dtype_name(options.cache_dtype or options.dtype),
            routing_skew=options.routing_skew,
        ),
        program=Program(
            frontend=options.frontend,
            partitioner=options.partitioner,
            loop=options.loop,
            context=options.context,
            kernels=options.kernels,
            dispatch=options.dispatch,
            capacity_factor=options.capacity_factor,
            microbatches=options.microbatches,
        ),
        engine=options.engine,
        n_layers=options.layers,
    )


def run_folder(experiment: Experiment, out: Path | None) -> Path:
    """`--out`, or `runs/<model>-<slice>-<plan>` with what departs from the usual program."""
    if out is not None:
        return out
    program = experiment.program
    return default_folder(
        experiment.model.name.rsplit("/", 1)[-1],
        experiment.topology.name,
        str(experiment.plan).replace("=", ""),
        "torchxla" if program.frontend is Frontend.TORCHXLA else "",
        "auto" if program.partitioner is Partitioner.AUTO else "",
        "scan" if program.loop is Loop.SCAN else "",
        "" if program.context is ContextForm.AUTO else program.context,
        "plain" if program.kernels is Kernels.OFF else "",
        "" if program.dispatch is DispatchForm.AUTO else program.dispatch.value,
        "" if program.microbatches is None else f"microbatches{program.microbatches}",
    )
