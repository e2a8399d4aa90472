"""How a plan starts in a server: each flag with its source, and what the server cannot express (`servers.toml`)."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshscope.cost.predicted import with_default_chunk
from meshscope.files import own_table
from meshscope.model.stored_format import weight_dtype_of
from meshscope.plans.experiment import Experiment
from meshscope.plans.placement import order_text
from meshscope.serialize import from_plain, picked
from meshscope.units import format_dtype

Values = Mapping[str, str | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlag:
    """A flag with its value, and the public file that defines or uses it."""

    words: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command that starts a server with a plan; `not_expressed` are the parts it has no flag for."""

    server: str
    command: str
    flags: tuple[LaunchFlag, ...]
    not_expressed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """A row of `servers.toml`: a server or a benchmark, how a plan starts it, and how its command is read."""

    server: str = ""
    start: str = ""
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    flags: tuple[tuple[str, ...], ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict[str, str])
    cache: Mapping[str, str] = field(default_factory=dict[str, str])
    lacks: tuple[str, ...] = ()
    sentences: Mapping[str, str] = field(default_factory=dict[str, str])
    of_layers: tuple[tuple[str, ...], ...] = ()
    of_first_layers: str | None = None
    name: str = ""
    starts: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    switches: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    is_benchmark: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])

    def flag(self, name: str, value: str | int, key: str | None = None) -> LaunchFlag:
        """`--name value`, or `name=value` for a name with this ending."""
        words = (f"{name}{value}",) if name.endswith("=") else (name, *filter(None, [str(value)]))
        return LaunchFlag(words=words, source=self.sources[key or next(iter(self.sources))])


TABLES = own_table("serving/servers.toml")
COMMANDS = from_plain(tuple[ServerCommand, ...], TABLES["servers"])


def launches_of(experiment: Experiment, n_layers: int | None = None) -> tuple[Launch, ...]:
    """The launch of an experiment in every known server; `n_layers` is set for a truncated model."""
    values = _values(experiment, n_layers)
    servers = (command for command in COMMANDS if command.start)
    return tuple(_launch(server, experiment, values, n_layers) for server in servers)


def _launch(
    server: ServerCommand, experiment: Experiment, values: Values, n_layers: int | None
) -> Launch:
    plan, workload, model = experiment.plan, experiment.workload, experiment.model
    weights, cache = workload.weight_dtype, workload.cache_dtype
    words = {"weights": server.weights.get(weights), "cache": server.cache.get(cache)}
    flags = list(_maxtext_axes(server, experiment) if server.server == "MaxText" else ())
    rows = (*server.flags, *(server.of_layers if n_layers is not None else ()))
    named = ((row, {**values, **words}.get(row[1])) for row in rows)
    flags += [server.flag(row[0], value, *row[2:]) for row, value in named if value is not None]
    # Without an option, an engine has the activation dtype, or the weights of the checkpoint.
    as_loaded = {workload.activation_dtype, model.default_weight_dtype}
    has_words = words["weights"] is not None or weights in as_loaded
    has_cache = words["cache"] is not None or cache == workload.activation_dtype
    sentences = {**TABLES["lacks"], **server.sentences}
    lacking = {
        "sp": plan.sp,
        **{axis: getattr(plan, axis) > 1 for axis in ("cp", "pp", "fsdp")},
        "order": experiment.device_order is not None,
        "ep_over_data": plan.data_axis in plan.expert_axes,
        "ep_over_both": len(plan.expert_axes) > 1,
        "weights": not has_words,
        "cache": not has_cache,
        "model": True,
    }
    facts = picked(plan, "cp", "pp", "fsdp", "ep", "data_axis")
    facts |= {"weights": format_dtype(weights), "cache": format_dtype(cache)}
    lost = [sentences[key].format_map(facts) for key in server.lacks if lacking[key]]
    if n_layers is not None and server.of_first_layers is not None:
        lost.append(f"the weights of the first layers: {server.of_first_layers}")
    start = server.start.format(model=shlex.quote(model.name))
    return Launch(
        server=server.server,
        command=f"{start} {shlex.join(word for flag in flags for word in flag.words)}",
        flags=tuple(flags),
        not_expressed=tuple(lost),
    )


def _values(experiment: Experiment, n_layers: int | None) -> Values:
    """The values of flags by the names in `servers.toml`; a default, or an axis of size 1, is None."""
    plan, workload, model = experiment.plan, experiment.workload, experiment.model
    chunk, weights = workload.prefill_chunk, format_dtype(workload.weight_dtype)
    # The common name, unless the option takes it as the name of the checkpoint's own format.
    if weight_dtype_of(model, weights) != workload.weight_dtype:
        weights = workload.weight_dtype
    is_cut = chunk is not None and chunk < workload.prompt
    sizes: dict[str, Any] = {"tp": plan.tp, "batch": workload.batch, "prompt": workload.prompt}
    wide, cache = workload.activation_dtype, workload.cache_dtype
    optional = {
        "pp": (plan.pp, plan.pp > 1),
        "data": (plan.data_size, plan.data_size > 1),
        "ep": (plan.ep, plan.ep > 1),
        "experts_over_tp": ("", plan.expert_axes == ("tp",)),
        "other_activations": (wide, wide != "bf16"),
        "other_weights": (weights, workload.weight_dtype != model.default_weight_dtype),
        "other_cache": (format_dtype(cache), cache != wide),
        "other_chunk": (chunk or "off", with_default_chunk(experiment).workload != workload),
        "is_cut": ("true", is_cut),
        "cut_chunk": (chunk, is_cut),
    }
    return {
        **sizes,
        **{name: value if is_set else None for name, (value, is_set) in optional.items()},
        "topology": experiment.topology.name,
        "plan": str(plan),
        "order": order_text(experiment.mesh, experiment.topology),
        "output": workload.output,
        "context": workload.context,
        "rank_batch": workload.batch // plan.data_size,
        "device_batch": f"{workload.batch / plan.n_devices:g}",
        "tp_and_data": plan.data_size * plan.tp,
        "chunk": chunk,
        "chunk_or_all": chunk or -1,
        "n_layers": n_layers,
        "override": json.dumps({"num_hidden_layers": n_layers}),
        "dummy": "dummy",
        "true": "true",
    }


def _maxtext_axes(server: ServerCommand, experiment: Experiment) -> Iterator[LaunchFlag]:
    """Sizes on ICI, and of the outermost axis also on DCN; experts take a separate axis."""
    plan, n_slices = experiment.plan, experiment.topology.n_slices
    tensor = "tensor_sequence" if plan.sp else "tensor"
    axes = {"pipeline": plan.pp, "data": plan.dp, "fsdp": plan.fsdp}
    axes |= {"context": plan.cp, tensor: plan.tp}
    match plan.expert_axes:
        case ("tp",):
            axes |= {tensor: 1, "expert": plan.ep}
        case (_,):
            axes |= {"data": 1, "fsdp": 1, "expert": plan.ep}
        case _:
            pass
    outermost = next((name for name, size in axes.items() if size > 1), "")
    for name, size in axes.items():
        n_dcn = n_slices if name == outermost and size % n_slices == 0 else 1
        if size > 1 or name == "fsdp":
            yield server.flag(f"ici_{name}_parallelism=", size // n_dcn)
        if n_dcn > 1:
            yield server.flag(f"dcn_{name}_parallelism=", n_dcn)
