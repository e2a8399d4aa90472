"""The Benchmark Report 0.2.1 of llm-d: a simulated server in the format in which tools keep measured ones."""

import hashlib
from importlib.metadata import version
from typing import Any

import yaml

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
    result = outcome.result
    figures, tool = result.figures, {"tool": "meshscope", "tool_version": version("meshscope")}
    placed = [("replica" if outcome.prefill is None else "decode", outcome.main)]
    if outcome.prefill is not None:
        placed.append(("prefill", outcome.prefill))
    latency = {
        key: {"units": units}
        | {name.removesuffix("_s"): getattr(one, name) for name in one.__slots__}
        for name, (key, units) in _LATENCIES.items()
        if (one := getattr(figures, name)) is not None
    }
    rates = {"request_rate": ("queries/s", figures.requests_per_s)}
    rates["output_token_rate"] = ("tokens/s", figures.output_tokens_per_s)
    lengths = dict(zip(("input", "output"), outcome.mean_tokens, strict=True))
    report = {
        "version": "0.2.1",
        "run": {"uid": _digest(outcome), "description": "simulated by meshscope, not measured"},
        "scenario": {
            "stack": [
                {
                    "metadata": {"label": role, "cfg_id": _digest(one)},
                    "standardized": {
                        "kind": "inference_engine",
                        **tool,
                        "role": role,
                        **_engine(one),
                    },
                    "native": {},
                }
                for role, one in placed
            ],
            "load": {
                "metadata": {"description": outcome.load},
                "standardized": {
                    **tool,
                    "source": "unknown",
                    "input_seq_len": {"distribution": "other", "value": lengths["input"]},
                    "output_seq_len": {"distribution": "other", "value": lengths["output"]},
                    **({} if result.offered_per_s is None else {"rate_qps": result.offered_per_s}),
                    **(
                        {}
                        if result.max_concurrency is None
                        else {"concurrency": result.max_concurrency}
                    ),
                },
                "native": {},
            },
        },
        "results": {
            "request_performance": {
                "aggregate": {
                    "requests": {
                        "total": figures.n_requests,
                        "failures": 0,
                        "incomplete": figures.n_requests - figures.n_finished,
                        **{
                            f"{k}_length": {"units": "count", "mean": n} for k, n in lengths.items()
                        },
                    },
                    "latency": latency,
                    "throughput": {k: {"units": u, "mean": n} for k, (u, n) in rates.items()},
                }
            }
        },
    }
    return yaml.safe_dump(report, sort_keys=False)


def _engine(placed: PlacedPool) -> dict[str, Any]:
    experiment = placed.experiment
    plan = experiment.plan
    sizes = {"dp": plan.data_size, "dp_local": plan.data_size, **picked(plan, "tp", "ep", "pp")}
    return {
        "replicas": placed.n_instances,
        "model": {"name": experiment.model.name},
        "accelerator": {
            "model": experiment.topology.chip.name,
            "count": experiment.topology.n_chips,
            "parallelism": sizes,
        },
    }


def _digest(one: object) -> str:
    return hashlib.sha256(repr(one).encode()).hexdigest()[:16]
