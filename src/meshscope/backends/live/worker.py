"""Worker process that runs, times and profiles an experiment with JAX or torch_xla.

`python -m meshscope.backends.live.worker REQUEST.json OUT_DIR` writes the compiled HLO of each phase, a
profile and a report, or an error report. It is a separate process because JAX reads its platform
from the environment and because a crash must not end the parent. It ends with its parent.
"""

import gzip
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshscope.backends.live.checkpoint import Checkpoint
from meshscope.backends.live.names import (
    HLO,
    PROFILING,
    REPORT,
    TIMING,
    TRACE,
    WARMING_UP,
    hlo_name,
    stage_words,
)
from meshscope.hardware.chips import ChipKind
from meshscope.plans.experiment import Experiment, experiment_from_dict
from meshscope.programs.environments import tracing_variables
from meshscope.programs.frontends import frontend_of
from meshscope.workers import end_with_parent, error_report, report_progress, reported

GZIP_LEVEL = 1  # HLO text shrinks 15 times; higher levels take seconds and gain little
VERSIONED = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
DUMPS = "dumps"  # HLO that XLA writes for torch_xla; removed after reading
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")


def set_environment(experiment: Experiment, out: Path, *, n_processes: int) -> None:
    """Sets the variables that JAX or torch_xla reads on import; call it before the import.

    Requests virtual CPU devices by number. For other devices JAX chooses its platform.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if experiment.program.frontend.is_traced:
        _set_torchxla_environment(experiment, out)
        return
    if experiment.topology.chip.kind is ChipKind.CPU:
        os.environ["JAX_PLATFORMS"] = "cpu"
        n_devices = experiment.topology.n_devices // n_processes
        flag = f"--xla_force_host_platform_device_count={n_devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def _set_torchxla_environment(experiment: Experiment, out: Path) -> None:
    """Gives the devices to torch_xla and the CPU to JAX, which only rewrites programs.

    torch_xla gives no access to the compiled HLO, so XLA dumps it.
    """
    os.environ.update(tracing_variables(experiment.topology.n_devices))
    os.environ["JAX_PLATFORMS"] = "cpu"
    if experiment.topology.chip.kind is ChipKind.TPU:
        os.environ["PJRT_DEVICE"] = "TPU"
        del os.environ["CPU_NUM_DEVICES"]
    phases = "|".join(phase.value for phase in experiment.phases)
    flags = (
        f"--xla_dump_to={out / DUMPS} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=^({phases})"
    )
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def run_request(experiment: Experiment, options: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Compiles, times and profiles the experiment; returns the report."""
    session, devices = _started(experiment, options, out)
    from meshscope.backends.live.session import host_tokens  # imports JAX

    for program, text in session.hlo_texts().items():
        path = out / HLO / hlo_name(program)
        with gzip.open(path, "wt", GZIP_LEVEL, encoding="utf-8") as file:
            file.write(text)
    requests, outputs, warm_up_s = _timed(session, options)
    report_progress(stage_words(PROFILING))
    profiled = session.profiled(out / TRACE, n_decode_steps=options["profiled_steps"])
    _flatten(out / TRACE)
    if options["coordinator"] is not None:
        from meshscope.backends.live.devices import gather_profiles  # imports JAX

        gather_profiles(out / TRACE, process_id=options["process_id"])
    memory = session.memory()
    shutil.rmtree(out / DUMPS, ignore_errors=True)
    return {
        "requests": requests,
        "tokens": [] if experiment.is_part_of_decode else host_tokens(outputs),
        "profiled": profiled,
        "seconds": {**session.seconds, "warm_up": warm_up_s},
        "memory": memory,
        "costs": session.costs(),
        "versions": versions((*VERSIONED, *frontend_of(experiment).packages)),
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        "devices": devices,
    }


def _started(
    experiment: Experiment, options: Mapping[str, Any], out: Path
) -> tuple[Any, list[dict[str, Any]]]:
    """The session, and the description of its devices."""
    prompt = _prompt(experiment, options)
    if experiment.program.frontend.is_traced:
        from meshscope.programs.torchxla.session import (  # torch_xla before JAX
            TorchSession,
            open_devices,
        )

        report_progress("opening devices")
        devices = open_devices(experiment.topology)
        seed, dumps = options["seed"], out / DUMPS
        session = TorchSession.started(
            experiment, seed=seed, prompt=prompt, dumps=dumps, report=report_progress
        )
        return session, devices
    from meshscope.backends.live.devices import (  # imports JAX
        device_record,
        join_processes,
        live_devices,
    )
    from meshscope.backends.live.session import Session

    join_processes(options)
    devices = live_devices(experiment.topology)
    make_weights = _weights_maker(experiment, options)
    session = Session.started(
        experiment, devices, make_weights=make_weights, prompt=prompt, report=report_progress
    )
    return session, [device_record(device) for device in devices]


def _weights_maker(experiment: Experiment, options: Mapping[str, Any]) -> Any:
    """A function from a program to its weights, from the checkpoint or random."""
    from meshscope.programs.jax.values import placed_weights, random_weights  # imports JAX

    if options["checkpoint"] is None:
        moe = experiment.model.moe
        n_experts = None if moe is None else moe.n_experts
        return lambda program: random_weights(program, seed=options["seed"], n_experts=n_experts)
    checkpoint = Checkpoint(Path(options["checkpoint"]))
    return lambda program: placed_weights(experiment, program, checkpoint.read)


def _prompt(experiment: Experiment, options: Mapping[str, Any]) -> Any:
    """Token ids [B, S]: the given ones for every sequence, or random ones.

    A part of decode has no prompt, and random tokens of its first step.
    """
    import numpy as np  # slow to import

    workload, is_part = experiment.workload, experiment.is_part_of_decode
    shape = (workload.batch, workload.decode_tokens if is_part else workload.prompt)
    if options["prompt_tokens"] is not None:
        return np.broadcast_to(np.array(options["prompt_tokens"], np.int32), shape)
    random = np.random.default_rng(options["seed"])
    return random.integers(0, experiment.model.vocab, shape, dtype=np.int32)


def _timed(
    session: Any, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[Any], float]:
    """Times of the requests, the results of each step of the last one, and seconds of the warm-up."""
    before = time.perf_counter()
    report_progress(stage_words(WARMING_UP))
    for _ in range(options["warmup"]):
        session.request()
    warm_up_s = time.perf_counter() - before
    requests: list[dict[str, Any]] = []
    outputs: list[Any] = []
    last_s = warm_up_s / options["warmup"]
    for index in range(options["repeats"]):
        n_left = options["repeats"] - index + 1  # with the profiled one
        progress = f"request {index + 1} of {options['repeats']}"
        report_progress(f"{stage_words(TIMING)}, {progress}", n_left * last_s)
        seconds, outputs = session.request()
        requests.append(seconds)
        last_s = seconds.get("prefill_s", 0.0) + sum(seconds["decode_s"])
    return requests, outputs, warm_up_s


def _flatten(trace: Path) -> None:
    """Moves the profiles, named by host, up into the folder and removes everything else."""
    for profile in trace.glob("plugins/profile/*/*.xplane.pb"):
        profile.rename(trace / profile.name)
    shutil.rmtree(trace / "plugins", ignore_errors=True)


def versions(names: Sequence[str] = VERSIONED) -> dict[str, str]:
    """Versions of the installed packages among `names`."""
    installed: dict[str, str] = {}
    for name in names:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def main(arguments: list[str]) -> int:
    """Runs one request; a Python exception becomes an error report."""
    request_file, out_dir = arguments
    directory = Path(out_dir)
    end_with_parent()
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    experiment = experiment_from_dict(request["experiment"])
    set_environment(experiment, directory, n_processes=request["options"]["n_processes"])
    return reported(
        lambda: run_request(experiment, request["options"], directory),
        directory / REPORT,
        error_report(Path(request_file)),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
