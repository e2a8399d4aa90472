"""Small programs of several families in which a collective is removed, doubled or regrouped: what changes, and what lint says.

Each program is partitioned by XLA, gets one fault in its text, and is compiled and run on eight virtual devices.
`benchmarks/lint_mutants.py` writes docs/evidence/lint_mutants.csv with `outcomes`.
"""

import random
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.lib import _jax, xla_client
from tiny_models import golden, tiny_experiment

from meshscope.events.enums import Phase
from meshscope.plans.mesh import Mesh
from meshscope.plans.program import Loop, Partitioner, Program
from meshscope.programs.jax.build import build_program
from meshscope.programs.jax.values import placed_weights
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.lint.findings import lint_module
from meshscope.readers.lint.log import WASTE

sys.path.append(str(Path(__file__).parents[1] / "lint"))
from mutants import Mutant, mutants, with_listed_groups

N_DEVICES = 8
BATCH = 16  # two sequences on each device, as the compiler drops a dim of one
N_FAULTS = 8  # of each program


class Case(NamedTuple):
    config: str
    plan: str
    phase: Phase
    partitioner: Partitioner = Partitioner.MANUAL
    loop: Loop = Loop.UNROLL


class Planted(NamedTuple):
    """A program after partitioning, its local arguments, its mesh, and the shardings of its parameters."""

    text: str
    arguments: list[jax.Array]
    mesh: Mesh


def planted(case: Case) -> Planted:
    """The program of a case over eight devices, with arrays for its arguments."""
    program = Program(partitioner=case.partitioner, loop=case.loop)
    experiment = tiny_experiment(case.config, case.plan, program, batch=BATCH)
    built = build_program(experiment, case.phase, jax.devices()[:N_DEVICES])
    with tempfile.TemporaryDirectory() as folder:
        compiled = built.lower().compile(
            {
                "xla_dump_to": folder,
                "xla_dump_hlo_as_text": True,
                "xla_dump_hlo_pass_re": "call-inliner",
            }
        )
        (text,) = (
            path.read_text()
            for path in Path(folder).glob(
                "*spmd-partitioner.after_call-inliner.before_pipeline-end.txt"
            )
        )
    weights = golden.weights_of(case.config)
    numbers = np.random.default_rng(0)

    def array(like: Any) -> np.ndarray:
        if np.issubdtype(like.dtype, np.integer):
            return numbers.integers(0, 90, like.shape).astype(like.dtype)
        return numbers.normal(size=like.shape).astype(like.dtype)

    rest = jax.tree.map(array, built.arguments[1:3])
    position = np.int32(golden.PROMPT + 3 if case.phase is Phase.DECODE else 0)
    arrays = placed_weights(experiment, built, weights.__getitem__)
    leaves = jax.tree.leaves((arrays, *rest, position)[: len(built.arguments)])
    kept = sorted(compiled._executable._kept_var_idx)
    shardings = jax.tree.leaves(compiled.input_shardings)
    local = [_local(leaves[n], sharding) for n, sharding in zip(kept, shardings, strict=True)]
    text = with_listed_groups(text, N_DEVICES)
    return Planted(text=text, arguments=local, mesh=Mesh(axes=experiment.mesh.axes))


def _local(array: Any, sharding: Any) -> jax.Array:
    """The parts of the devices, in order, as an array that is split along its first dim."""
    placed = jax.device_put(np.asarray(array), sharding)
    parts = sorted(placed.addressable_shards, key=lambda part: part.device.id)
    (n, *dims) = parts[0].data.shape or (0,)
    devices = jax.make_mesh((N_DEVICES,), ("all",))
    spec = jax.sharding.PartitionSpec("all" if parts[0].data.shape else None)
    if not parts[0].data.shape:
        spec = jax.sharding.PartitionSpec()
    whole = (n * N_DEVICES, *dims) if parts[0].data.shape else ()
    return jax.make_array_from_single_device_arrays(
        whole, jax.sharding.NamedSharding(devices, spec), [part.data for part in parts]
    )


_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_SHARDING = re.compile(f", sharding={_BRACES}")
_ALIASES = re.compile(f"input_output_alias={_BRACES}, ")  # arguments are used again
_PARAMETER = re.compile(r" parameter\((\d+)\)")


def compiled(text: str) -> Any:
    """The executable of a partitioned program, whose devices are replicas, so that XLA does not partition it again."""
    for old, new in (
        (f"num_partitions={N_DEVICES}", f"replica_count={N_DEVICES}"),
        (" partition-id()", " replica-id()"),
        (", use_global_device_ids=true", ""),
    ):
        text = text.replace(old, new)
    text = re.sub(r", channel_id=\d+|, allow_spmd_sharding_propagation_to_\w+=\{[^}]*\}", "", text)
    module = xla_client.hlo.hlo_module_from_text(_ALIASES.sub("", _SHARDING.sub("", text)))
    computation = xla_client.XlaComputation(module.as_serialized_hlo_module_proto())
    options = xla_client.CompileOptions()
    options.num_replicas = options.executable_build_options.num_replicas = N_DEVICES
    options.num_partitions = options.executable_build_options.num_partitions = 1
    devices = jax.devices()[:N_DEVICES]
    options.executable_build_options.device_assignment = xla_client.DeviceAssignment.create(
        np.arange(N_DEVICES)[:, None]
    )
    mlir = _jax.mlir.xla_computation_to_mlir_module(computation)
    return devices[0].client.compile_and_load(mlir, xla_client.DeviceList(tuple(devices)), options)


def outcome(executable: Any, arguments: Sequence[jax.Array]) -> list[np.ndarray]:
    """What each device returns."""
    results = executable.execute_sharded(list(arguments))
    return [
        np.asarray(part)
        for parts in results.disassemble_into_single_device_arrays()
        for part in parts
    ]


def is_changed(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> bool:
    """Whether a result differs by more than the order of float32 sums explains."""
    for one, other in zip(before, after, strict=True):
        if one.dtype.kind != "f":
            if not np.array_equal(one, other):
                return True
        elif not np.allclose(
            one, other, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(one).max(initial=0)), equal_nan=True
        ):
            return True
    return False


def optimized(executable: Any, source: str) -> str:
    """The optimized program over partitions again, with the shardings that the source states for its arguments."""
    shardings: dict[str, str] = {}
    for line in source[source.index("\nENTRY") :].split("\n"):
        if (number := _PARAMETER.search(line)) and (sharding := _SHARDING.search(line)):
            shardings[number[1]] = sharding[0]
    head, entry = executable.hlo_modules()[0].to_string().split("\nENTRY", 1)
    entry = _PARAMETER.sub(lambda match: match[0] + shardings.get(match[1], ""), entry)
    head = head.replace(f"replica_count={N_DEVICES}", f"num_partitions={N_DEVICES}", 1)
    return f"{head}\nENTRY{entry}".replace(" replica-id()", " partition-id()")


def reported(text: str, mesh: Mesh) -> str:
    """What `lint` says of a program: no, possible or certain."""
    every = lint_module(parse_hlo(text, "planted"), mesh).findings
    findings = [one for one in every if one.kind not in WASTE]
    if any(one.is_certain for one in findings):
        return "certain"
    return "possible" if findings else "no"


def chosen(case: Case, program: Planted) -> list[Mutant]:
    """Some faults of a program, the same each time."""
    every = list(mutants(program.text, program.mesh.sizes))
    random.Random("-".join(case)).shuffle(every)
    return every[:N_FAULTS]


def outcomes(case: Case) -> Iterator[tuple[Mutant | None, bool, str, Mesh]]:
    """The program of a case without a fault and with each: whether its result changes, and its optimized text."""
    program = planted(case)
    whole = compiled(program.text)
    expected = outcome(whole, program.arguments)
    yield None, False, optimized(whole, program.text), program.mesh
    for mutant in chosen(case, program):
        executable = compiled(mutant.text)
        changes = is_changed(expected, outcome(executable, program.arguments))
        yield mutant, changes, optimized(executable, program.text), program.mesh
