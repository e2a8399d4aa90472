"""Compiles a saved torch_xla graph, an HLO proto, to optimized HLO text.

`compile_graph` starts this module as its worker process:
`python -m meshscope.backends.compile.saved_graph PROTO TOPOLOGY TEXT REPORT`.
The worker needs JAX and libtpu, but not torch.
"""

import gzip
import importlib.util
import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from meshscope.backends.compile.worker import GZIP_LEVEL, set_environment, slice_devices
from meshscope.errors import CompileError, MissingToolError, ParseError, SpecError
from meshscope.files import check_regular
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.programs.environments import torchxla_python, torchxla_variables
from meshscope.store.folder import scratch_folder
from meshscope.workers import (
    WorkerTask,
    end_with_parent,
    error_report,
    reported,
    run_worker,
)

MAX_PROTO_BYTES = 2**31  # protobuf's own limit
SAVED_BY = "torch_xla._XLAC._get_xla_tensors_hlo_proto([tensors])"


def compile_graph(proto: Path, topology: Topology, text: Path) -> Mapping[str, str]:
    """Compiles an HLO proto for a slice, writes the HLO text, and returns the compiler versions."""
    if topology.chip.kind is not ChipKind.TPU:
        raise SpecError(
            f"'{topology.name}' is not a TPU slice; torch_xla graphs compile only for TPUs. "
            "Use a TPU slice, e.g. v6e-8."
        )
    _check_proto(proto)
    with scratch_folder() as scratch:
        report = scratch / "report.json"
        arguments = (
            "-m",
            "meshscope.backends.compile.saved_graph",
            str(proto),
            topology.name,
            str(text),
        )
        run_worker(
            (*arguments, str(report)),
            report,
            _task(proto, topology),
            python=_python(),
            environment=torchxla_variables(),
        )
        return json.loads(report.read_text(encoding="utf-8"))


def _task(proto: Path, topology: Topology) -> WorkerTask:
    return WorkerTask(
        process=f"{proto}: the TPU compiler",
        activity=f"compiling this graph for {topology.name}",
        rejection=f"{proto}: the TPU compiler rejected the graph",
        memory_remedy="Use a machine with more memory.",
        crash_remedy="Try another topology or another version of libtpu.",
        error=CompileError,
    )


def _check_proto(proto: Path) -> None:
    try:
        check_regular(proto)
        n_bytes = proto.stat().st_size
        with proto.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise ParseError(
            f"{proto}: cannot be read ({error.strerror}). Give an HLO proto."
        ) from error
    if n_bytes > MAX_PROTO_BYTES:
        raise ParseError(
            f"{proto}: has {n_bytes} bytes; a proto has at most {MAX_PROTO_BYTES}. Give one graph."
        )
    if start.startswith((b"HloModule", b"module")):
        raise ParseError(
            f"{proto}: is text, but a torch_xla graph is a proto from {SAVED_BY}. "
            "Omit --frontend to import optimized HLO text."
        )


def _python() -> str:
    """This Python if it has the compiler, else that of the torchxla extra."""
    has_compiler = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))
    python = sys.executable if has_compiler else torchxla_python()
    if not has_compiler and python == sys.executable:
        raise MissingToolError(
            "compiling a graph needs jax and libtpu, which are not installed. Install the extra: "
            "pip install -e '.[tpu]' in your clone (Linux x86-64)."
        )
    return python


def main(arguments: list[str]) -> int:
    """Compiles one graph to a text file, and writes the compiler versions as its report."""
    end_with_parent()
    proto, topology, text = Path(arguments[0]), parse_topology(arguments[1]), Path(arguments[2])
    set_environment()

    def versions() -> dict[str, str]:
        from meshscope.programs.torchxla.lowering import Traced, lowered  # imports JAX

        traced = Traced(proto=proto.read_bytes())
        compiled = lowered(traced, slice_devices(topology), name="program").compile()
        with gzip.open(text, "wt", GZIP_LEVEL, encoding="utf-8") as file:
            file.write(compiled.as_text())
        return {name: version(name) for name in ("jax", "jaxlib", "libtpu")}

    report = Path(arguments[3])
    return reported(versions, report, error_report(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
