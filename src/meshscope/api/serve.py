"""`meshscope.serve_sim`: continuous batching under load, simulated with predicted step times."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from meshscope.api.records import chip_profile
from meshscope.api.request import AUTO, ExperimentRequest
from meshscope.cost.predicted import has_figures
from meshscope.errors import SpecError, nearest
from meshscope.planner.objective import objective_of
from meshscope.serialize import to_plain
from meshscope.serving.cache_blocks import BLOCK_TOKENS, cache_blocks
from meshscope.serving.engine import EnginePolicy
from meshscope.serving.host_fit import HostFit, fitted_host, read_bench
from meshscope.serving.load import Arrivals, Load, random_load, recorded_load
from meshscope.serving.results import ServiceLimits
from meshscope.serving.simulation import SimulatedLoad, simulated_load
from meshscope.serving.step_costs import tabulated_costs
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.plan.plan import parse_plan

DEFAULT_REQUESTS = 1000


class Lengths(StrEnum):
    """How the lengths of prompts and outputs are distributed around --prompt and --output."""

    FIXED = "fixed"
    GEOMETRIC = "geometric"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """The options of `serve-sim`, by the names of the command line."""

    model: str
    topology: str
    plan: str
    rate: float | None = None
    arrivals: str = Arrivals.POISSON.value
    requests: int | None = None
    prompt: int = 1024
    output: int = 128
    lengths: Lengths = Lengths.FIXED
    slo: str | None = None
    dtype: str = AUTO
    weight_dtype: str | None = None
    cache_dtype: str | None = None
    layers: int | None = None
    max_sequences: int = 256
    max_step_tokens: int = 2048
    prefix_hit: float = 0.0
    host_overhead: float = 0.0
    calibrate_host: Path | None = None
    memory_frac: float = 0.9
    seed: int = 0
    profile: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRun:
    """A simulated load, with what was asked and what is assumed."""

    request: ServeRequest
    experiment: Experiment
    objective: ServiceLimits
    policy: EnginePolicy
    n_cache_tokens: int  # of a rank
    n_left_out: int  # requests of a trace that exceed the context of the model
    host_fit: HostFit | None
    result: SimulatedLoad

    def as_dict(self) -> dict[str, Any]:
        """The document of --json."""
        options = {name: getattr(self.request, name) for name in ServeRequest.__slots__}
        return {
            "request": {
                n: str(v) if isinstance(v, Path) else to_plain(v) for n, v in options.items()
            },
            "objective": to_plain(self.objective),
            "policy": to_plain(self.policy),
            "n_cache_tokens": self.n_cache_tokens,
            "n_left_out": self.n_left_out,
            "host_fit": None if self.host_fit is None else to_plain(self.host_fit),
            "is_stable": self.result.is_stable,
            **to_plain(self.result),
        }


def serve_sim(model: str | Path, *, topology: str, plan: str, **options: Any) -> ServingRun:
    """Simulates a server of this plan under load; the options are the fields of ServeRequest.

    Example:
        >>> meshscope.api.serve.serve_sim("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", rate=4.0)

    Raises:
        MeshscopeError: The request is impossible, or the chip lacks published figures.
    """
    known = list(ServeRequest.__slots__)
    for name in options:
        if name not in known:
            raise SpecError(f"'{name}' is not an option of serve-sim. {nearest(name, known)}")
    return simulated(ServeRequest(model=str(model), topology=topology, plan=plan, **options))


def simulated(request: ServeRequest) -> ServingRun:
    """The simulation that the request asks for."""
    if not 0 < request.memory_frac <= 1:
        raise SpecError(f"--memory-frac {request.memory_frac} is not in (0, 1]. Use 0.9.")
    if request.calibrate_host is not None and request.host_overhead:
        raise SpecError("--calibrate-host fits what --host-overhead sets. Give one of them.")
    bench = None if request.calibrate_host is None else read_bench(request.calibrate_host)
    wanted = objective_of(request.slo)
    limits = ServiceLimits(ttft_s=wanted.ttft_s, tpot_s=wanted.tpot_s)
    policy = EnginePolicy(
        max_sequences=request.max_sequences,
        max_step_tokens=request.max_step_tokens,
        prefix_hit_frac=request.prefix_hit,
        host_s=request.host_overhead,
    )
    experiment = _experiment(request)
    load, n_left_out = _fitting(_load(request), experiment.model.max_position)
    profile = chip_profile(request.profile, experiment.topology.chip)
    if not has_figures(experiment.topology.chip, profile):
        raise SpecError(
            f"{experiment.topology.chip.name} has no published figures for times. Give --profile FILE, "
            "as 'meshscope calibrate' writes it."
        )
    blocks = cache_blocks(experiment, memory_frac=request.memory_frac)
    costs = tabulated_costs(
        experiment,
        max_sequences=policy.max_sequences,
        max_step_tokens=policy.max_step_tokens,
        max_context=max(
            int((load.n_prompt + load.n_output).max()),
            0 if bench is None else bench.prompt + bench.output,
        ),
        profile=profile,
    )
    host_fit = None
    if bench is not None:
        n_ranks = experiment.plan.data_size
        host_fit = fitted_host(bench, costs, blocks, policy, n_ranks=n_ranks)
        policy = replace(policy, host_s=host_fit.host_s)
    result = simulated_load(
        load,
        costs=costs,
        blocks=blocks,
        policy=policy,
        objective=limits,
        n_ranks=experiment.plan.data_size,
    )
    return ServingRun(
        request=request,
        experiment=experiment,
        objective=limits,
        policy=policy,
        n_cache_tokens=blocks.n_blocks * BLOCK_TOKENS,
        n_left_out=n_left_out,
        host_fit=host_fit,
        result=result,
    )


def _experiment(request: ServeRequest) -> Experiment:
    """The plan with one sequence on each data-parallel rank."""
    plan = parse_plan(request.plan).filled(parse_topology(request.topology).n_devices)
    return ExperimentRequest(
        model=request.model,
        topology=request.topology,
        plan=request.plan,
        batch=plan.data_size,
        prompt=request.prompt,
        output=request.output,
        dtype=request.dtype,
        weight_dtype=request.weight_dtype,
        cache_dtype=request.cache_dtype,
        layers=request.layers,
    ).experiment()


def _load(request: ServeRequest) -> Load:
    if request.arrivals not in set(Arrivals):
        n_requests = DEFAULT_REQUESTS if request.requests is None else request.requests
        _check_recorded(request)
        return recorded_load(Path(request.arrivals), rate_per_s=request.rate, n_requests=n_requests)
    if request.rate is None:
        raise SpecError("--rate is missing. Give requests per second, such as --rate 4.")
    return random_load(
        Arrivals(request.arrivals),
        rate_per_s=request.rate,
        n_requests=request.requests or DEFAULT_REQUESTS,
        prompt=request.prompt,
        output=request.output,
        is_geometric=request.lengths is Lengths.GEOMETRIC,
        seed=request.seed,
    )


def _check_recorded(request: ServeRequest) -> None:
    """SpecError for options of random loads."""
    defaults: Mapping[str, Any] = {
        name: ServeRequest.__dataclass_fields__[name].default for name in ("lengths", "seed")
    }
    for name, default in defaults.items():
        if getattr(request, name) != default:
            raise SpecError(
                f"--{name} {getattr(request, name)} changes nothing: '{request.arrivals}' is a trace. "
                "Drop it."
            )


def _fitting(load: Load, max_position: int | None) -> tuple[Load, int]:
    """The requests within the context of the model, and the number of others."""
    if max_position is None:
        return load, 0
    fits = load.n_prompt + load.n_output <= max_position
    if not fits.any():
        raise SpecError(f"no request fits in the {max_position:,} positions of the model.")
    kept = replace(
        load,
        arrival_s=load.arrival_s[fits],
        n_prompt=load.n_prompt[fits],
        n_output=load.n_output[fits],
    )
    return kept, int(np.count_nonzero(~fits))
