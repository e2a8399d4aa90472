"""Only rings of the compiler are windowed einsums; rings of the program stay permutes."""

import pytest
from made_hlo import module_text, rows_in

from meshscope.events.collective import Collective, Groups
from meshscope.events.enums import Kind, Part

SCOPE = "jit(prefill)/shard_map/prefill/layers0-0/attn"
TARGET = (
    'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="{name}.{n}_0",'
    "_xla_megascale_target={{{{100000->200000}},{{200000->100000}},{{100001->200001}},{{200001->100001}}}},"
    '_xla_megascale_transfer_type="ONE_TO_ONE"}}'
)


def _rows(body: list[str], mesh: str, *, n_devices: int = 4) -> list[Collective]:
    """Rows of a program for slices of so many devices."""
    lines = ["%q = f32[8,4] parameter(0)", "%k0 = f32[8,4] parameter(1)", *body]

    def crosses_slices(groups: Groups) -> bool | None:
        return any(len({device // n_devices for device in group}) > 1 for group in groups)

    text = module_text(
        "\n".join(f"  {line}" for line in lines), header=f", num_partitions={n_devices}"
    )
    return rows_in(text, mesh, crosses_slices=crosses_slices)


def _dot(number: int, keys: str) -> str:
    return (
        f"%dot.{number} = f32[8,8] dot(%q, %{keys}), lhs_contracting_dims={{1}}, "
        f'rhs_contracting_dims={{1}}, metadata={{op_name="{SCOPE}/dot_general"}}'
    )


def _ring(name: str) -> list[str]:
    """Three permutes of this name and channels, with the dots of their shards."""
    turns = [
        f"%k{turn} = f32[8,4] collective-permute(%k{turn - 1}), channel_id={turn}, "
        f'source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}, metadata={{op_name="{SCOPE}/{name}"}}'
        for turn in (1, 2, 3)
    ]
    return [*turns, *(_dot(turn, f"k{turn}") for turn in range(4))]


def test_each_step_of_a_program_ring_is_a_permute() -> None:
    rows = _rows(_ring("ppermute"), "cp=4")
    facts = {(row.kind, row.part, row.axis, row.shape, row.inserted_by, row.count) for row in rows}
    assert facts == {(Kind.PERMUTE, Part.ATTN, "cp", (8, 4), "program", 1)}
    assert len(rows) == 3


def test_shards_that_the_compiler_forwards_beside_its_dots_are_a_gather() -> None:
    """Synchronous permutes forward each shard unchanged, so no sums are sent."""
    (row,) = _rows(_ring("dot_general"), "tp=4")
    assert (row.kind, row.algorithm) == (Kind.ALL_GATHER, "windowed einsum")
    assert row.payload_bytes == 32 * 4 * 4


@pytest.mark.parametrize(
    ("name", "inserted_by", "kind"),
    [
        ("ppermute", "program", Kind.PERMUTE),
        ("collective-permute", "partitioner", Kind.ALL_GATHER),
    ],
)
def test_across_slices_the_rendezvous_names_the_origin_of_a_permute(
    name, inserted_by, kind
) -> None:
    """A send and a recv have no op_name, and the user of the result has that of another operation."""
    body = [
        "%after = token[] after-all()",
        f"%send = (f32[8,4], u32[], token[]) send(%k0, %after), {TARGET.format(name=name, n=1)}",
        f"%recv = (f32[8,4], u32[], token[]) recv(%after), {TARGET.format(name=name, n=1)}",
        "%sent = token[] send-done(%send)",
        "%received = (f32[8,4], token[]) recv-done(%recv)",
        "%k1 = f32[8,4] get-tuple-element(%received), index=0",
        _dot(0, "k1"),
    ]
    rows = _rows(body, "cp=2,tp=2", n_devices=2)
    assert [(row.inserted_by, row.kind) for row in rows] == [(inserted_by, kind)]
