"""The work of a process that runs, times and profiles an experiment with JAX or torch_xla.

It is separate because JAX reads its platform from the environment and because a crash must not end the
parent.
"""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshscope.backends.live.checkpoint import Checkpoint
from meshscope.files import write_gzip
from meshscope.plans.experiment import Experiment, experiment_from_dict
from meshscope.programs.frontends import frontend_of, program_file
from meshscope.workers import report_progress

HLO, TRACE = "hlo", "trace"  # folders of a run
STAGES = ("compiling", "placing weights", "warming up", "timing", "profiling")
VERSIONED = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")


def stage_words(stage: str) -> str:
    """The stage of a live run and its number."""
    return f"{stage}, step {STAGES.index(stage) + 1} of {len(STAGES)}"


def run_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles, times and profiles an experiment; writes HLO and profile, and returns the report."""
    experiment = experiment_from_dict(request["experiment"])
    options, out = request["options"], Path(request["folder"])
    session = _started(experiment, options)
    from meshscope.backends.live.session import gather_profiles, host_tokens  # imports JAX

    for program, text in session.hlo_texts().items():
        write_gzip(out / HLO / program_file(program), text)
    before = time.perf_counter()
    report_progress(stage_words("warming up"))
    for _ in range(options["warmup"]):
        session.request()
    warm_up_s = time.perf_counter() - before
    requests, outputs = list[dict[str, Any]](), list[Any]()
    last_s = warm_up_s / options["warmup"]
    for index in range(options["repeats"]):
        n_left = options["repeats"] - index + 1  # with the profiled one
        step = f"{stage_words('timing')}, request {index + 1} of {options['repeats']}"
        report_progress(step, n_left * last_s)
        seconds, outputs = session.request()
        requests.append(seconds)
        last_s = seconds.get("prefill_s", 0.0) + sum(seconds["decode_s"])
    report_progress(stage_words("profiling"))
    profiled = session.profiled(out / TRACE, n_decode_steps=options["profiled_steps"])
    flatten_trace(out / TRACE)
    if options["coordinator"] is not None:
        gather_profiles(out / TRACE, process_id=options["process_id"])
    return {
        "requests": requests,
        "tokens": [] if experiment.is_part_of_decode else host_tokens(outputs),
        "profiled": profiled,
        "seconds": {**session.seconds, "warm_up": warm_up_s},
        "memory": session.memory(),
        "costs": session.costs(),
        "versions": versions((*VERSIONED, *frontend_of(experiment).packages)),
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
    }


def flatten_trace(folder: Path) -> None:
    """Moves the profiles that JAX wrote, named by host, and its Chrome traces up into the folder."""
    for file in folder.glob("plugins/profile/*/*"):
        if file.name.endswith((".xplane.pb", ".trace.json.gz")):
            file.rename(folder / file.name)
    shutil.rmtree(folder / "plugins", ignore_errors=True)


def _started(experiment: Experiment, options: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {"prompt": _prompt(experiment, options), "report": report_progress}
    seed = options["seed"]
    file = options["checkpoint"]
    read = None if file is None else Checkpoint(Path(file)).read
    is_traced = experiment.program.frontend.is_traced
    if is_traced:
        import_module("torch_xla")  # before JAX
    from meshscope.backends.live import session as live  # imports JAX

    if options["coordinator"] is not None:  # connects to the other processes
        live.jax.distributed.initialize(
            coordinator_address=options["coordinator"],
            num_processes=options["n_processes"],
            process_id=options["process_id"],
        )
    devices = live.live_devices(experiment.topology)
    if is_traced:
        from meshscope.programs.torchxla.live import live_program, live_weights

        build = partial(live_program, experiment, devices=devices)
        weights_of = partial(live_weights, experiment=experiment, seed=seed, read=read)
        return live.Session(experiment, build, make_weights=weights_of, **given)
    from meshscope.programs.jax.build import build_program
    from meshscope.programs.jax.values import placed_weights, random_weights

    moe = experiment.model.moe
    n_experts = None if moe is None else moe.n_experts

    def make_weights(program: Any) -> Any:
        if read is not None:
            return placed_weights(experiment, program, read)
        return random_weights(program, seed=seed, n_experts=n_experts)

    build = partial(build_program, experiment, devices=devices)
    return live.Session(experiment, build, make_weights=make_weights, **given)


def _prompt(experiment: Experiment, options: Mapping[str, Any]) -> Any:
    """Token ids [B, S]: the given ones, or random ones, for every sequence; a part of decode has the tokens of its first step."""
    import numpy as np  # slow to import

    workload, is_part = experiment.workload, experiment.is_part_of_decode
    shape = (workload.batch, workload.decode_tokens if is_part else workload.prompt)
    if options["prompt_tokens"] is not None:
        return np.broadcast_to(np.array(options["prompt_tokens"], np.int32), shape)
    random = np.random.default_rng(options["seed"])
    return random.integers(0, experiment.model.vocab, shape, dtype=np.int32)


def versions(names: Sequence[str] = VERSIONED) -> dict[str, str]:
    """Versions of the installed packages among `names`."""
    installed: dict[str, str] = {}
    for name in names:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
