"""The compiler keeps every timed collective inside the loop, at its full size; no piece starts after the budget."""

import json
import os
import subprocess
import sys

import pytest

from meshscope.backends.calibrate import measure as child
from meshscope.backends.calibrate.measure import collectives_budget_s, in_time

PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from meshscope.backends.calibrate.measure import collective_body, payload_of
from meshscope.analysis.samples import KINDS

mesh = Mesh(np.array(jax.devices()), ("tp",))
found = {}
for kind in KINDS:
    body = collective_body(kind, "tp", mesh.size)
    repeated = lambda start, count: lax.fori_loop(0, count, lambda _, taken: body(taken), start)
    program = jax.jit(jax.shard_map(
        repeated, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"), check_vma=False))
    held = 4096 // (mesh.size if kind == "all_gather" else 1) // 4
    text = program.lower(jnp.zeros(held * mesh.size), jnp.int32(3)).compile().as_text()
    found[kind] = [line for line in text.splitlines() if kind.replace("_", "-") in line
                   or "collective-permute" in line]
    out = program(jnp.ones(held * mesh.size), jnp.int32(3))
    assert out.shape == (held * mesh.size,), kind
print(json.dumps({"lines": found, "least": payload_of(KINDS[1], 4, 8)}))
"""


def test_every_collective_is_kept_at_its_payload() -> None:
    """Two devices, payload 4,096 B: 1,024 elements go in or come out, by the nccl-tests rule."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["least"] == 32  # an element for each of eight devices
    shapes = {
        "all_reduce": "= f32[1024]{0} all-reduce(",
        "all_gather": "= f32[1024]{0} all-gather(",
        "reduce_scatter": "= f32[512]{0} reduce-scatter(",
        "all_to_all": "all-to-all(",
        "permute": "= f32[1024]{0} collective-permute(",
    }
    for kind, shape in shapes.items():
        lines = report["lines"][kind]
        assert any(shape in line for line in lines), (kind, lines)


class Clock:
    """A clock that tests advance."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("budget_s", "seconds"), [(15.0, 7.5), (120.0, 60.0), (600.0, 540.0)])
def test_collectives_get_at_least_half_of_the_budget(budget_s: float, seconds: float) -> None:
    assert collectives_budget_s(budget_s) == seconds


def test_each_list_has_its_first_piece_and_those_that_begin_in_time(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(child, "time", clock)
    done: list[int] = []
    for piece in in_time(range(5), 103.0):
        done.append(piece)
        clock.now += 2.0
    assert (done, list(in_time(range(3), 103.0))) == ([0, 1], [0])
