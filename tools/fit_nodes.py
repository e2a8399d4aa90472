"""Fits the network between two nodes of four H100s, as vLLM 0.8.5 uses it, to the requests that Xu et al. print.

    python tools/fit_nodes.py

Fits to the half of `tools/published_requests.csv` that is Llama-3.2-3B; Llama-2-13B judges. Writes
`experiments/h100-nodes.json`, a profile for `--profile`, and prints the errors. docs/evidence/figures.md has them.

Four constants; a request inside a node needs only the last:

- a step of NCCL between nodes takes longer than in NCCL's own model, by the same time for each protocol;
- bytes/s between nodes for each GPU;
- what a send between stages on different nodes adds for each GPU of a stage;
- what connects two GPUs of consecutive stages before their first send.
"""

import csv
from collections.abc import Mapping
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from meshscope.analysis.request import modeled_request_time
from meshscope.cost.predicted import connecting_s, predicted_times
from meshscope.hardware.interconnect.constants import constants_of
from meshscope.hardware.interconnect.profile import ChipProfile, save_profile
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Engine
from meshscope.plans.workload import Workload

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tools" / "published_requests.csv"
PROFILE = ROOT / "experiments" / "h100-nodes.json"
NODES = "2xh100:4"
PROMPT = OUTPUT = 128
START = (5e-5, 5e9, 5e-3, 0.3)
SOURCE = (
    "tools/fit_nodes.py, from figures 8 and 9 of Xu et al., Characterizing Communication Patterns in Distributed "
    "Large Language Model Inference (Llama-3.2-3B, vLLM 0.8.5.post1, NCCL 2.21.5)"
)


def published() -> list[dict[str, str]]:
    """The requests that the paper prints."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def experiment(model: str, plan: str) -> Experiment:
    """One request in the paper's conditions: batch 1, prompt and output 128, bf16, on one node or two."""
    parsed = parse_plan(plan)
    n = parsed.n_devices
    return experiment_of(
        model=read_model(model),
        plan=parsed,
        topology=parse_topology(NODES if n > 4 else f"h100:{n}"),
        workload=Workload(batch=1, prompt=PROMPT, output=OUTPUT),
        engine=Engine.VLLM,
    )


def request_s(asked: Experiment, profile: ChipProfile) -> Mapping[str, float]:
    """TTFT, TPOT and e2e of the first request after a start, in seconds."""
    time = modeled_request_time(predicted_times(asked, profile), n_decode_steps=OUTPUT - 1)
    assert time.ttft is not None
    assert time.tpot is not None
    assert time.e2e is not None
    first_s = connecting_s(asked, profile)
    return {
        "TTFT": time.ttft.value_s + first_s,
        "TPOT": time.tpot.value_s,
        "e2e": time.e2e.value_s + first_s,
    }


def profile_of(point: tuple[float, ...]) -> ChipProfile:
    """H100s whose network has these four constants."""
    step_s, bytes_per_s, crossing_s, connection_s = point
    published_constants = constants_of(parse_topology(NODES).chip)
    protocols = tuple(
        replace(one, network_step_s=one.network_step_s + step_s)
        for one in published_constants.protocols
    )
    constants = replace(
        published_constants,
        protocols=protocols,
        host_bytes_per_s=bytes_per_s,
        crossing_s=crossing_s,
        source=f"{published_constants.source}; between nodes: {SOURCE}",
    )
    empty: Any = ()
    return ChipProfile(
        chip="h100", topology=NODES, plan="tp=8", constants=constants, fits=empty, points=empty,
        matrices=empty, memory=empty, conditions={"source": SOURCE}, connection_s=connection_s,
    )  # fmt: skip


def fitted() -> tuple[float, ...]:
    """The constants with the least squares of logarithmic errors of TTFT and TPOT, to two digits."""
    rows = [r for r in published() if r["half"] == "fitted" and r["metric"] != "e2e"]

    def errors(point: np.ndarray) -> list[float]:
        profile = profile_of(tuple(np.exp(point).tolist()))
        return [
            log(request_s(experiment(r["model"], r["plan"]), profile)[r["metric"]] / float(r["published_s"]))
            for r in rows
        ]  # fmt: skip

    best = least_squares(errors, np.log(START), diff_step=1e-3).x
    return tuple(float(f"{x:.2g}") for x in np.exp(best).tolist())


def main() -> None:
    """Fits, writes the profile, and prints each row with its error."""
    point = fitted()
    profile = profile_of(point)
    save_profile(profile, PROFILE, force=True)
    print("step_s, bytes/s, crossing_s, connection_s:", *point)
    for row in published():
        seconds = request_s(experiment(row["model"], row["plan"]), profile)[row["metric"]]
        print(*row.values(), f"{seconds:.4g}", f"{seconds / float(row['published_s']):.2f}")


if __name__ == "__main__":
    main()
