"""Times of the most loaded device under skewed routing, against explicit arithmetic."""

from typing import Any

import pytest
from tables import table

import meshscope
from meshscope.api.options import request_of
from meshscope.api.request import ExperimentRequest
from meshscope.cost.expert_load import device_load, exchange_load
from meshscope.cost.simulator import scheduled_collective
from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.topology import parse_topology
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import parse_hlo

GPT_OSS = {"model": "openai/gpt-oss-20b", "topology": "v6e-8", "batch": 64, "prompt": 1024}


@table
def test_a_device_with_twice_the_rows(options, rows, exchange) -> None:
    experiment = request_of(
        ExperimentRequest, {**GPT_OSS, "routing_skew": 2.0, **options}
    ).experiment()
    assert device_load(experiment, Phase.PREFILL) == pytest.approx(rows, rel=0.01)
    assert exchange_load(experiment, Phase.PREFILL) == pytest.approx(exchange, rel=0.01)


@pytest.mark.slow
def test_skew_lengthens_rows_of_the_exchange_experts_and_the_step() -> None:
    even, skewed = (
        meshscope.predict(**GPT_OSS, plan="dp=8,ep=8", routing_skew=skew) for skew in (1.0, 4.0)
    )
    parts = ("moe.dispatch", "moe.combine")
    pairs = zip(even.collectives.to_dicts(), skewed.collectives.to_dicts(), strict=True)
    for one, other in pairs:
        factor = 4 if one["part"] in parts and one["kind"] == "all_to_all" else 1
        assert other["dur_s"] == pytest.approx(factor * one["dur_s"])
        assert other["payload_bytes"] == one["payload_bytes"]  # a mean over devices
    assert skewed.time.ttft_s > 2 * even.time.ttft_s
    assert skewed.time.tpot_s > even.time.tpot_s


@table
def test_a_load_that_no_routing_gives_is_refused(options: dict[str, Any], most: int) -> None:
    options = GPT_OSS | options
    meshscope.predict(**options, routing_skew=float(most))
    with pytest.raises(SpecError, match=f"Use 1 to {most}\\."):
        meshscope.predict(**options, routing_skew=float(most) + 0.1)


HLO = """HloModule step, is_scheduled=true, entry_computation_layout={(bf16[512,128]{1,0})->bf16[512,128]{1,0}}, num_partitions=8

ENTRY main {
  p = bf16[512,128]{1,0} parameter(0)
  a = bf16[512,128]{1,0} all-to-all(p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, metadata={op_name="jit(f)/prefill/layer0/moe.dispatch/all_to_all"}
  ROOT b = bf16[512,128]{1,0} all-to-all(a), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, metadata={op_name="jit(f)/prefill/layer0/attn/all_to_all"}
}
"""


def test_the_compiled_exchange_with_experts_takes_longer_and_others_do_not() -> None:
    compiled = module_collectives(
        parse_hlo(HLO, "step"), mesh=Mesh(axes=(("dp", 8),)), crosses_slices=lambda _: None
    )
    exchange, other = [(operation,) for operation in compiled.scheduled]
    for operations, factor in ((exchange, 3), (other, 1)):
        one, longer = (
            scheduled_collective(operations, parse_topology("v6e-8"), exchange_load=load)
            for load in (1.0, 3.0)
        )
        assert longer.seconds.value_s == pytest.approx(factor * one.seconds.value_s)
