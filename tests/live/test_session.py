"""The cache between prefill and decode, whose layouts may differ."""

from pathlib import Path

import jax
import numpy as np
from jax.experimental.layout import Layout

from meshscope.backends.live.session import Session, host_tokens
from meshscope.events.enums import Phase
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload
from meshscope.programs.jax import build
from meshscope.programs.jax.values import random_weights


class _SlotsLast(Layout):
    """In the place of the compiler's choice, which on CPU is the usual layout."""

    AUTO = Layout(major_to_minor=(0, 2, 3, 1))


def _session(config_file: Path, *, prefill_chunk: int | None = None) -> Session:
    experiment = experiment_of(
        model=read_model(str(config_file)),
        plan=parse_plan("dp=2,tp=2"),
        topology=parse_topology("cpu:4"),
        workload=Workload(batch=4, prompt=16, output=6, prefill_chunk=prefill_chunk),
    )
    return Session(
        experiment,
        jax.devices()[:4],
        make_weights=lambda program: random_weights(program, seed=1),
        prompt=np.arange(64, dtype=np.int32).reshape(4, 16),
        report=lambda _: None,
    )


def test_a_separate_cache_layout_of_decode_gives_the_same_tokens(config_file, monkeypatch) -> None:
    shared = _session(config_file)
    monkeypatch.setattr(build, "MemoryLayout", _SlotsLast)
    monkeypatch.setattr(
        build, "compiler_lays_out_cache", lambda _experiment, phase: phase is Phase.DECODE
    )
    separate = _session(config_file)

    assert "{1,3,2,0}" in separate.hlo_texts()[Phase.DECODE].splitlines()[0]
    assert host_tokens(separate.request()[1]) == host_tokens(shared.request()[1])
    cache = shared.new_cache()
    shared.compiled.clear()  # a timed step does not look for formats
    assert shared.as_cache(cache) is cache


def test_chunks_of_a_prefill_give_the_tokens_of_the_whole_batch(config_file: Path) -> None:
    whole = host_tokens(_session(config_file).request()[1])
    for chunk in (16, 8):
        assert host_tokens(_session(config_file, prefill_chunk=chunk).request()[1]) == whole
