"""Compares the benchmark of a server with the simulation of its load, and with the device alone."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshscope.api.options import numbers, option, refuse, request
from meshscope.api.request import AUTO, ExperimentRequest, PredictRequest
from meshscope.api.serve import ServeRequest, ServingRun, benchmarked_run
from meshscope.errors import SpecError
from meshscope.hardware.topology import parse_topology
from meshscope.reports.model import wrapped
from meshscope.serialize import picked
from meshscope.serving.benchmarks import BenchResult, read_bench
from meshscope.serving.load import Load
from meshscope.serving.simulation import served_alone
from meshscope.units import format_rate, format_seconds

_OF_SERVER = (
    *("server", "dtype", "weight_dtype", "cache_dtype", "max_sequences", "max_step_tokens"),
    *("separate_steps", "host_overhead", "profile"),
)


@request
class BenchmarkRequest:
    """What a benchmark file does not say of its server; an option that contradicts the file is refused."""

    model: str | None = option(
        "MODEL: Model of the server.", default=None, shown="from the benchmark"
    )
    topology: str | None = option(
        "SLICE: Slice of the server, which few benchmarks name.", default=None
    )
    plan: str | None = option("PLAN: Plan of the server.", default=None, shown="from the benchmark")
    server: str | None = option(PredictRequest, default=None)
    dtype: str = option(ExperimentRequest, default=AUTO)
    weight_dtype: str | None = option(ExperimentRequest, default=None)
    cache_dtype: str | None = option(ExperimentRequest, default=None)
    max_sequences: int = option(ServeRequest, default=256)
    max_step_tokens: int = option(ServeRequest, default=2048)
    separate_steps: bool = option(ServeRequest, default=False)
    host_overhead: float = option(ServeRequest, default=0.0)
    profile: Path | None = option(ServeRequest, default=None)
    fit_host: bool = option(
        "Fit the host's seconds of a step to the median time between tokens.", default=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkComparison:
    """A benchmark, the simulation of its load, and the times of the device alone.

    `device_s` has the TTFT of one request on an idle server, and the step that decodes the mean number of
    sequences that are in the simulated engine, both without time of the host.
    """

    bench: BenchResult
    served: ServingRun
    device_s: dict[str, float]

    @property
    def host_s(self) -> float:
        """Seconds of the host in a step of the simulation."""
        return self.served.outcome.main.pool.policy.host_s

    @property
    def bound_by(self) -> str:
        """`host` if more than half of the measured time between tokens is beyond the device's step, else `device`."""
        return "host" if self.device_s["itl"] < 0.5 * self.bench.itl_s else "device"

    def rows(self) -> Iterator[tuple[str, float | None, float, float | None]]:
        """Metric with its statistic, and measured, served and device seconds of the times that the file has."""
        for name in ("ttft", "tpot", "itl"):
            simulated = getattr(self.served.outcome.result.figures, name)
            for what in ("p50", "p99"):
                measured_s = self.bench.times_s.get(name, {}).get(what)
                if simulated is not None and (measured_s is not None or what == "p50"):
                    device_s = self.device_s.get(name) if what == "p50" else None
                    served_s = getattr(simulated, f"{what}_s")
                    yield f"{name.upper()} {what}", measured_s, served_s, device_s

    def as_dict(self) -> dict[str, Any]:
        """The document of `--json`: measured, served and device, then the conditions of the simulation."""
        served = self.served.as_dict()
        return {
            "bound_by": self.bound_by,
            "measured": asdict(self.bench) | {"times_s": {**self.bench.times_s}},
            "served": served["figures"],
            "device_s": self.device_s,
            "host_s": self.host_s,
            "simulation": served,
        }

    def lines(self) -> Iterator[str]:
        """The text of the command, in up to twelve lines."""
        bench, outcome = self.bench, self.served.outcome
        experiment = outcome.main.experiment
        failed = f", {bench.n_failed} more failed and are left out" if bench.n_failed else ""
        yield from wrapped(
            f"{experiment.model.name} on {experiment.topology.name} {experiment.plan}: {bench.writer}, "
            f"{bench.n_requests:,} requests{failed}"
        )
        yield f"{'':<16}{'measured':>10}{'served':>10}{'device':>10}{'served/measured':>17}"
        rates = (bench.output_tokens_per_s, outcome.result.figures.output_tokens_per_s, None)
        for label, *values in (*self.rows(), ("output tokens/s", *rates)):
            text_of = format_rate if label == "output tokens/s" else format_seconds
            cells = "".join(f"{'-' if one is None else text_of(one):>10}" for one in values)
            measured, served, _ = values
            ratio = "" if measured is None or served is None else f"{served / measured:>17.2f}"
            yield f"{label:<16}{cells}{ratio}"
        step, median = map(format_seconds, (self.device_s["itl"], bench.itl_s))
        yield f"bound by the {self.bound_by}: a device step takes {step} of {median} between tokens"
        host, server = format_seconds(self.host_s), outcome.server
        how = "served   by an ideal engine without host time; --fit-host fits it"
        if server is not None:
            how = f"served   by {server.basis}"
        elif outcome.host_fit is not None:
            fitted = "fitted to this benchmark; what the device's model misses is in it"
            how = f"host     {host} a step, {fitted}"
        elif self.host_s:
            how = f"host     {host} a step, as given"
        yield from wrapped(how)
        lengths = f"prompts of {bench.prompt:,} and outputs of {bench.output:,} tokens, the means"
        yield from wrapped(f"assumed  {lengths} of the benchmark; predicted step times")


def benchmark_comparison(path: Path, request: BenchmarkRequest) -> BenchmarkComparison:
    """Compares the benchmark in a file with the simulation of its load.

    Raises:
        MeshscopeError: The file is no benchmark, it lacks what no option gives, or an option contradicts it.
    """
    bench = read_bench(path)
    model = _agreed(path, "model", bench.model, request.model)
    if request.topology is None:
        raise SpecError(f"{path} does not name the slice of its server. Give --topology SLICE.")
    topology = parse_topology(request.topology)
    if bench.n_chips is not None and bench.n_chips != topology.n_chips:
        raise SpecError(
            f"{path} is of {bench.n_chips} accelerators, and --topology {request.topology} has "
            f"{topology.n_chips} chips. Give the slice of the benchmark."
        )
    plan = _agreed(path, "plan", bench.plan, request.plan)
    limit = bench.max_concurrency
    refuse(
        (
            request.fit_host and request.host_overhead,
            "--fit-host fits what --host-overhead sets. Give one of them.",
        ),
        (
            request.fit_host and request.server is not None,
            f"--server {request.server} brings its own host time. Omit --fit-host, or --server.",
        ),
    )
    served = benchmarked_run(
        ServeRequest(
            model=model,
            topology=request.topology,
            plan=plan,
            rate=numbers(bench.rate_per_s),
            # Without a limit and a rate, all requests arrive at once.
            max_concurrency=None
            if limit is None and bench.rate_per_s is not None
            else numbers(limit or bench.n_requests),
            requests=bench.n_requests,
            arrivals="poisson",
            **picked(bench, "prompt", "output"),
            **picked(request, *_OF_SERVER),
        ),
        bench if request.fit_host else None,
    )
    return BenchmarkComparison(bench=bench, served=served, device_s=_device_s(bench, served))


def _agreed(path: Path, name: str, of_file: str | None, given: str | None) -> str:
    """The model or plan of the file and of the option; SpecError if they differ, or neither has one."""
    if of_file is None and given is None:
        raise SpecError(f"{path} does not name the {name} of its server. Give --{name}.")
    # An option may be a config.json, whose path says nothing of the name.
    is_comparable = name == "plan" or not Path(str(given)).exists()
    if of_file is not None and given is not None and is_comparable and _key(of_file) != _key(given):
        raise SpecError(
            f"{path} is of {name} '{of_file}', and --{name} is '{given}'. Omit the option, or give another file."
        )
    return given or str(of_file)


def _key(name: str) -> str:
    """What is compared of a model's or plan's name: owners differ between copies of a checkpoint."""
    return name.rsplit("/", 1)[-1].lower().replace(" ", "")


def _device_s(bench: BenchResult, served: ServingRun) -> dict[str, float]:
    pool = served.outcome.main.pool
    no_host = dict.fromkeys(("host_s", "host_sequence_s", "host_request_s"), 0.0)
    n_prompt, n_output = np.array([bench.prompt]), np.array([bench.output])
    one = Load(arrival_s=np.zeros(1), n_prompt=n_prompt, n_output=n_output)
    requests, _ = served_alone(one, replace(pool, policy=replace(pool.policy, **no_host)))
    n_running = max(1, round(served.outcome.result.pools[0].mean_running))
    context = np.array([bench.prompt + bench.output / 2])
    step_s = float(pool.costs.decode_s(n_running, context)[0])
    return {"ttft": float(requests.first_token_s[0]), "tpot": step_s, "itl": step_s}
