"""Options that several commands share, and commands whose options are the fields of a request."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from meshscope.api.request import ExperimentRequest, LiveRequest, request_of

R = TypeVar("R", bound=ExperimentRequest)
Output = TypeVar("Output")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
FullOption = Annotated[
    bool, typer.Option("--full", help="All conditions and tables below the answer.")
]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace an earlier run, once the new one is complete.")
]

TOPOLOGY = typer.Option(
    "--topology", metavar="SLICE", help="v6e-8, a chip grid v6e:2x4, or slices 2xv6e:4x4."
)
PLAN = typer.Option("--plan", metavar="PLAN", help="tp=8, dp=2,tp=4, tp=8,sp, fsdp=-1; -1 fills.")
PROFILE = typer.Option("--profile", metavar="FILE", help="Chip profile from calibrate, for times.")

DTYPE_HELP = "Dtype of weights, activations and KV cache."

# Every field of a request: its help text and the form that --help shows.
OPTIONS: dict[str, Any] = {
    "model": typer.Argument(
        metavar="MODEL", help="A model id, a config.json, or a folder with one."
    ),
    "topology": TOPOLOGY,
    "plan": PLAN,
    "batch": typer.Option(help="Sequences, over all devices."),
    "prompt": typer.Option(help="Input tokens of a sequence."),
    "output": typer.Option(help="Output tokens of a sequence."),
    "dtype": typer.Option(
        metavar="DTYPE", help=f"{DTYPE_HELP} auto: weights as in the checkpoint, others bf16."
    ),
    "weight_dtype": typer.Option(
        "--weight-dtype",
        "--quantization",
        metavar="DTYPE",
        help="Weight dtype, if different from --dtype: int8, fp8, awq, mxfp4, ...",
    ),
    "cache_dtype": typer.Option(
        "--cache-dtype",
        "--kv-cache-dtype",
        metavar="DTYPE",
        help="KV cache dtype, if different from --dtype.",
    ),
    "layers": typer.Option(metavar="N", help="Only the first N layers of the model."),
    "engine": typer.Option(help="Serving engine whose collectives to predict."),
    "partitioner": typer.Option(
        help="Who inserts the collectives: the program (manual) or the compiler (auto)."
    ),
    "frontend": typer.Option(help="Framework of the program."),
    "loop": typer.Option(help="Layers unrolled, or scanned as one loop body."),
    "context": typer.Option(help="How cp brings keys to queries in prefill."),
    "kernels": typer.Option(
        help="Kernels where chip and shapes allow (auto), or an error (on), or none (off)."
    ),
    "dispatch": typer.Option(help="How tokens reach experts on other devices."),
    "capacity_factor": typer.Option(
        metavar="X", help="Expert capacity over the mean load; tokens beyond it are dropped."
    ),
    "microbatches": typer.Option(
        metavar="N", help="Micro-batches into which prefill splits a device's batch (pp)."
    ),
    "prefill_chunk": typer.Option(
        metavar="N|auto|off",
        help="Prompt tokens that prefill processes at a time on a data-parallel rank.",
    ),
    "routing_skew": typer.Option(
        metavar="X",
        help="Load of the most loaded device's experts over the mean, which sets the step time.",
    ),
    "device_order": typer.Option(
        metavar="ORDER",
        help="Axes on the torus, such as y:dp=2,x:tp=4, or device ids in the order of the mesh.",
    ),
    "profile": PROFILE,
    "speculate": typer.Option(
        metavar="METHOD:k=N,acceptance=X",
        help="Speculative decoding by mtp, eagle or draft:MODEL, e.g. mtp:k=1,acceptance=0.85.",
    ),
    "cycles": typer.Option(
        help="Compute time by the compiler's estimates, or by its slower cycle profile."
    ),
    "engine_version": typer.Option(
        metavar="V", help="Release of the engine; by default the newest one installed."
    ),
    "compiler": typer.Option(
        metavar="NAME", help="Another version of JAX and libtpu, from meshscope compilers list."
    ),
    "training": typer.Option(
        "--training",
        help="A training step of --frontend maxtext: --prompt tokens of each of --batch sequences.",
    ),
    "repeats": typer.Option(metavar="N", min=1, help="Timed requests."),
    "warmup": typer.Option(metavar="N", min=1, help="Untimed requests before them."),
    "profiled_steps": typer.Option(
        metavar="N", min=1, help="Decode steps in the profile, after the timed requests."
    ),
    "checkpoint": typer.Option(
        metavar="DIR", help="Weights and tokenizer in Hugging Face's format."
    ),
    "prompt_text": typer.Option(
        metavar="TEXT", help="Prompt of every sequence, for the checkpoint's tokenizer."
    ),
    "coordinator": typer.Option(
        metavar="HOST:PORT", help="Address of process 0, if several processes run together."
    ),
    "process_id": typer.Option(
        metavar="I", min=0, help="Number of this process; process 0 writes the run."
    ),
    "n_processes": typer.Option(metavar="N", min=1, help="Number of processes."),
    "seed": typer.Option(min=0, help="Seed of random weights and prompts."),
}

LIVE_OPTIONS: dict[str, Any] = OPTIONS | {
    "dtype": typer.Option(
        metavar="DTYPE",
        help=DTYPE_HELP,
        show_default="f32 on CPU, auto elsewhere",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where a command writes and prints its run."""

    out: OutOption = None
    force: ForceOption = False
    full: FullOption = False
    as_json: JsonOption = False


def takes_request(run: Callable[[R, OutputOptions], None], kind: type[R]) -> Callable[..., None]:
    """A typer command whose options are the fields of the request, with --out, --force, --full and --json."""
    options = LIVE_OPTIONS if issubclass(kind, LiveRequest) else OPTIONS
    return command_of(run, kind, options=options, output=OutputOptions)


def command_of(
    run: Callable[[Any, Output], None],
    kind: type[Any],
    *,
    options: Mapping[str, Any],
    output: type[Output],
) -> Callable[..., None]:
    """A typer command whose options are the fields of `kind`, with these texts, then those of `output`."""

    def command(**values: Any) -> None:
        shown = {name: values.pop(name) for name in shown_options}
        run(request_of(kind, values), output(**shown))

    shown_options = _parameters(output)
    requested = {
        name: p.replace(annotation=Annotated[p.annotation, options[name]])
        for name, p in _parameters(kind).items()
    }
    parameters = [*requested.values(), *shown_options.values()]
    command.__doc__ = run.__doc__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  typer reads it
    return command


def _parameters(kind: type[Any]) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(kind)
    }


RetryOption = Annotated[
    bool, typer.Option("--retry-failed", help="Retry experiments that failed before.")
]
ReplaceOption = Annotated[
    bool, typer.Option("--force", help="Replace damaged runs and runs of other experiments.")
]
RunsOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the runs.", show_default="runs/<FILE>"),
]
