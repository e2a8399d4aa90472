"""Records the golden CPU profile again: `python tests/profile/golden/make_golden_profile.py`.

Eight virtual CPU devices, mesh (dp=2, tp=4); one prefill and three decode steps, each two layers in
a loop with an all-reduce over tp, then an all-gather over dp. Compiled before the profiler starts.
`cpu8.json` gets the facts of its collectives from the compiled HLO.
"""

import gzip
import json
import os
import re
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshscope.readers.profile.wire import Message
from meshscope.reports.export.chakra import span

HERE = Path(__file__).parent
N_LAYERS, N_STEPS = 2, 3


def program(phase: str, mesh: Mesh) -> object:
    """A jitted function named after the phase."""

    def step(x: jax.Array) -> jax.Array:
        def layer(_: int, value: jax.Array) -> jax.Array:
            with jax.named_scope("layers0-1"), jax.named_scope("mlp"):
                return jax.lax.psum(jnp.tanh(value), "tp") * 0.5 + value

        with jax.named_scope(phase):
            x = jax.lax.fori_loop(0, N_LAYERS, layer, x)
            return jax.lax.all_gather(x, "dp", tiled=True)

    step.__name__ = phase
    spec = PartitionSpec("dp", "tp")
    out = PartitionSpec(None, "tp")
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))


def facts(hlo: str) -> dict[str, dict[str, str]]:
    """Opcode and replica groups of each collective of the text, as written."""
    by_name: dict[str, dict[str, str]] = {}
    pattern = r"%?([\w.\-]+) = (\S+) (all-reduce|all-gather|while)\((.*)"
    for name, shape, opcode, rest in re.findall(pattern, hlo):
        groups = re.search(r"replica_groups=(\S+?),? (?:\w+=|$)", rest)
        by_name[name] = {"opcode": opcode, "shape": shape, "groups": groups[1] if groups else ""}
    return by_name


def without_programs(recorded: bytes) -> bytes:
    """The profile without the plane of the programs, which contains paths of this machine."""
    planes = [recorded[start:end] for start, end in zip(*_planes(recorded), strict=True)]
    kept = [plane for plane in planes if b"/host:metadata" not in plane[:100]]
    return b"".join(span(1, plane) for plane in kept)


def _planes(recorded: bytes) -> list[list[int]]:
    spans = Message(recorded, 0, len(recorded)).spans(1)
    return [positions.tolist() for positions in spans.chunk()]


def main() -> None:
    """Writes cpu8.xplane.pb.gz and cpu8.json."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "tp"))
    inputs = {"prefill": jnp.ones((32, 64)), "decode": jnp.ones((4, 64))}
    programs = {phase: program(phase, mesh) for phase in inputs}
    compiled = {phase: programs[phase].lower(inputs[phase]).compile() for phase in inputs}
    for phase, run in compiled.items():
        run(jax.device_put(inputs[phase], run.input_shardings[0][0])).block_until_ready()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2
    ready = {p: jax.device_put(inputs[p], compiled[p].input_shardings[0][0]) for p in inputs}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            with jax.profiler.StepTraceAnnotation("prefill", step_num=0):
                compiled["prefill"](ready["prefill"]).block_until_ready()
            for step in range(N_STEPS):
                with jax.profiler.StepTraceAnnotation("decode", step_num=step):
                    compiled["decode"](ready["decode"]).block_until_ready()
        recorded = next(Path(folder).glob("plugins/profile/*/*.xplane.pb")).read_bytes()
    kept = without_programs(recorded)
    (HERE / "cpu8.xplane.pb.gz").write_bytes(gzip.compress(kept, mtime=0))
    documents = {f"jit_{phase}": facts(run.as_text()) for phase, run in compiled.items()}
    (HERE / "cpu8.json").write_text(json.dumps(documents, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
