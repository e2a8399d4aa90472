"""Only rings of the compiler are windowed einsums; rings of the program stay permutes."""

import pytest

from meshscope.events.collective import Collective, Groups
from meshscope.events.enums import Kind, Part
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.parse import parse_hlo

SCOPE = "jit(prefill)/shard_map/prefill/layers0-0/attn"
TARGET = (
    'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="{name}.{n}_0",'
    "_xla_megascale_target={{{{100000->200000}},{{200000->100000}},{{100001->200001}},{{200001->100001}}}},"
    '_xla_megascale_transfer_type="ONE_TO_ONE"}}'
)


def _rows(body: list[str], mesh: Mesh, *, n_slices: int = 1) -> list[Collective]:
    lines = "\n".join(f"  {line}" for line in body)
    n_devices = mesh.n_devices // n_slices
    text = f"""\
HloModule m, is_scheduled=true, num_partitions={n_devices}

ENTRY %main (q: f32[8,4], k: f32[8,4]) -> f32[8,8] {{
  %q = f32[8,4] parameter(0)
  %k0 = f32[8,4] parameter(1)
{lines}
}}
"""

    def crosses_slices(groups: Groups) -> bool | None:
        return n_slices > 1 and any(
            len({device // n_devices for device in group}) > 1 for group in groups
        )

    return collectives_of(
        parse_hlo(text, "m.hlo"), mesh=mesh, n_steps_of={}, crosses_slices=crosses_slices
    )


def _dot(number: int, keys: str) -> str:
    return (
        f"%dot.{number} = f32[8,8] dot(%q, %{keys}), lhs_contracting_dims={{1}}, "
        f'rhs_contracting_dims={{1}}, metadata={{op_name="{SCOPE}/dot_general"}}'
    )


def test_each_step_of_a_program_ring_is_a_permute() -> None:
    turns = [
        f"%k{turn} = f32[8,4] collective-permute(%k{turn - 1}), channel_id=1, "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, "
        f'metadata={{op_name="{SCOPE}/ppermute"}}'
        for turn in (1, 2, 3)
    ]

    dots = [_dot(turn, f"k{turn}") for turn in range(4)]
    rows = _rows([*turns, *dots], Mesh(axes=(("cp", 4),)))

    facts = {(row.kind, row.part, row.axis, row.shape, row.inserted_by, row.count) for row in rows}
    assert facts == {(Kind.PERMUTE, Part.ATTN, "cp", (8, 4), "program", 1)}
    assert len(rows) == 3


def test_shards_that_the_compiler_forwards_beside_its_dots_are_a_gather() -> None:
    """Synchronous permutes forward each shard unchanged, so no sums are sent."""
    turns = [
        f"%k{turn} = f32[8,4] collective-permute(%k{turn - 1}), channel_id={turn}, "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, "
        f'metadata={{op_name="{SCOPE}/dot_general"}}'
        for turn in (1, 2, 3)
    ]

    (row,) = _rows(
        [*turns, *(_dot(turn, f"k{turn}") for turn in range(4))], Mesh(axes=(("tp", 4),))
    )

    assert (row.kind, row.algorithm) == (Kind.ALL_GATHER, "windowed einsum")
    assert row.payload_bytes == 32 * 4 * 4


@pytest.mark.parametrize(
    ("name", "inserted_by"), [("ppermute", "program"), ("collective-permute", "partitioner")]
)
def test_across_slices_the_rendezvous_names_the_origin_of_a_permute(name, inserted_by) -> None:
    """A send and a recv have no op_name, and the user of the result has that of another operation."""
    rows = _rows(
        [
            "%after = token[] after-all()",
            f"%send = (f32[8,4], u32[], token[]) send(%k0, %after), {TARGET.format(name=name, n=1)}",
            f"%recv = (f32[8,4], u32[], token[]) recv(%after), {TARGET.format(name=name, n=1)}",
            "%sent = token[] send-done(%send)",
            "%received = (f32[8,4], token[]) recv-done(%recv)",
            "%k1 = f32[8,4] get-tuple-element(%received), index=0",
            _dot(0, "k1"),
        ],
        Mesh(axes=(("cp", 2), ("tp", 2))),
        n_slices=2,
    )

    assert [row.inserted_by for row in rows] == [inserted_by]
    assert rows[0].kind is (Kind.PERMUTE if inserted_by == "program" else Kind.ALL_GATHER)
