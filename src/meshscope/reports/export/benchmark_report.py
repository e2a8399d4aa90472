"""The Benchmark Report 0.2.1 of llm-d: a simulated server in the format in which tools keep measured ones."""

import hashlib
from importlib.metadata import version
from typing import Any

import yaml

from meshscope.reports.charts.spec import filled, read_yaml
from meshscope.serialize import picked
from meshscope.serving.simulation import PlacedPool, ServingOutcome

_LATENCIES = {
    "ttft": ("time_to_first_token", "s"),
    "tpot": ("time_per_output_token", "s/token"),
    "itl": ("inter_token_latency", "s/token"),
    "e2e": ("request_latency", "s"),
}


def benchmark_report(outcome: ServingOutcome) -> str:
    """The report as YAML, which is a subset of the fields: those that a simulation has.

    Schema: llm-d/llm-d-benchmark@8bc9f1dd, llmdbenchmark/analysis/benchmark_report/schema_v0_2_1.py.
    """
    result, template = outcome.result, read_yaml("export/benchmark_report.yaml")
    figures = result.figures
    stack = [(outcome.main, "replica" if outcome.prefill is None else "decode")]
    if outcome.prefill is not None:
        stack.append((outcome.prefill, "prefill"))
    values = {
        **picked(figures, "n_requests", "requests_per_s", "output_tokens_per_s"),
        **picked(result, "offered_per_s", "max_concurrency"),
        **dict(zip(("input", "output"), outcome.mean_tokens, strict=True)),
        "uid": _digest(outcome),
        "version": version("meshscope"),
        "load": outcome.load,
        "stack": [filled(template["engine"], _engine(pool, role)) for pool, role in stack],
        "n_incomplete": figures.n_requests - figures.n_finished,
        "latency": {
            key: {"units": units}
            | {name.removesuffix("_s"): getattr(one, name) for name in one.__slots__}
            for name, (key, units) in _LATENCIES.items()
            if (one := getattr(figures, name)) is not None
        },
    }
    report = filled(template["report"], values)
    load = report["scenario"]["load"]
    load["standardized"] = {k: v for k, v in load["standardized"].items() if v is not None}
    return yaml.safe_dump(report, sort_keys=False)


def _engine(pool: PlacedPool, role: str) -> dict[str, Any]:
    experiment = pool.experiment
    return {
        **picked(experiment.plan, "data_size", "tp", "ep", "pp"),
        "uid": _digest(pool),
        "version": version("meshscope"),
        "role": role,
        "n_instances": pool.n_instances,
        "model": experiment.model.name,
        "chip": experiment.topology.chip.name,
        "n_chips": experiment.topology.n_chips,
    }


def _digest(one: object) -> str:
    return hashlib.sha256(repr(one).encode()).hexdigest()[:16]
