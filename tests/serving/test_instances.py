"""Instances that only prefill."""

import meshscope

ASK = {"topology": "v6e-4", "plan": "tp=4"}


def test_only_instances_that_decode_reserve_room_for_outputs() -> None:
    served = meshscope.serve_sim(
        "Qwen/Qwen3-4B", apart="1:1", rate=10.0, reserve_output=1.0, requests=4, **ASK
    )
    assert served.outcome.prefill.pool.policy.reserved_frac == 0.0
    assert served.outcome.main.pool.policy.reserved_frac == 1.0
