"""Communication that a row does not show: operations that may communicate, filters and names of axes."""

import json

import pytest
from made_hlo import module_text, rows_in

from meshscope.analysis.budget import Filter
from meshscope.events.collective import Effect
from meshscope.events.enums import Phase
from meshscope.plans.mesh import parse_mesh
from meshscope.readers.hlo.communication import other_operations
from meshscope.readers.hlo.parse import parse_hlo


def text_of(line: str) -> str:
    return module_text(f"  %a = f32[8] parameter(0)\n  ROOT {line}", header=", num_partitions=4")


def test_a_permute_that_stays_on_its_devices_matches_no_axis() -> None:
    line = "c = f32[8] collective-permute(a), channel_id=1, source_target_pairs={{0,0}}"
    (row,) = rows_in(text_of(line), "x=4")
    assert not Filter(axis="x").matches(row)
    assert Filter().matches(row)


def test_an_unknown_opcode_may_communicate() -> None:
    module = parse_hlo(text_of("x = f32[8] teleport(a)"), "m.hlo")
    (other,) = other_operations(module, Phase.DECODE)
    assert (other.opcode, other.target, other.effect) == ("teleport", None, Effect.UNKNOWN)
    assert (str(other), other.phase) == ("1 operation 'teleport' may communicate", Phase.DECODE)


@pytest.mark.parametrize("number", [1, "1"], ids=["number", "text"])
def test_numbers_of_a_custom_call_that_stands_for_a_collective_may_be_texts(number: object) -> None:
    """Protobuf writes integers of 64 bits as texts."""
    config = {"replica_groups": [[0, 1, 2, 3]]}
    config |= {"channel_id": number, "all_gather_dimension": number}
    text = text_of(
        's = f32[1024,4096] custom-call(a), custom_call_target="all-gather-start", '
        f"frontend_attributes={{async_collective_config={json.dumps(json.dumps(config))}}}"
    )
    (gather,) = (i for i in parse_hlo(text, "m.hlo").instructions if i.opcode == "all-gather-start")
    assert (gather.channel_id, gather.dimensions) == (1, (1,))


def test_an_axis_has_a_name_in_any_script() -> None:
    assert dict(parse_mesh("données=2,日=4").axes) == {"données": 2, "日": 4}
