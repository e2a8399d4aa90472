"""The effect of all-reduces and other collectives, in minimal texts."""

from fractions import Fraction

import pytest

from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import collectives_of, module_collectives, reshardings
from meshscope.readers.hlo.parse import parse_hlo

TEXT = """\
HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{computations}
ENTRY %main (part: f32[2,8], whole: f32[8,8]) -> f32[8,8] {{
  %part = f32[2,8] parameter(0)
  %whole = f32[8,8] parameter(1)
  %zero = f32[] constant(0)
  %one = f32[] constant(1)
  %origin = s32[] constant(0)
  %zeros = f32[8,8] broadcast(%zero), dimensions={{}}
  %ones = f32[8,8] broadcast(%one), dimensions={{}}
  %id = u32[] partition-id()
  %table = s32[4] constant({{0,2,4,6}})
  %entry = s32[1] dynamic-slice(%table, %id), dynamic_slice_sizes={{1}}
  %mine = s32[] reshape(%entry)
  %scalar = s32[] constant(2)
{body}
}}
"""
REDUCE = (
    "all-reduce({}), channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true, "
    'to_apply=%add, metadata={{op_name="jit(f)/prefill/layer0/mlp/dot_general"}}'
)


def _row(*body: str, computations: str = "") -> Collective:
    (row,) = _rows(*body, computations=computations)
    return row


def _rows(*body: str, computations: str = "") -> list[Collective]:
    lines = "\n".join(f"  {line}" for line in body)
    return _read(TEXT.format(body=lines, computations=computations))


def _read(text: str, crosses_slices=lambda _: None, **axes: int) -> list[Collective]:
    return collectives_of(
        parse_hlo(text, "m.hlo"),
        mesh=Mesh(axes=tuple((axes or {"tp": 4}).items())),
        n_steps_of={},
        crosses_slices=crosses_slices,
    )


WHOLE_BYTES = 8 * 8 * 4


def test_a_sum_of_zero_padded_shards_is_a_gather() -> None:
    row = _row(
        "%put = f32[8,8] dynamic-update-slice(%zeros, %part, %mine, %origin)",
        f"ROOT %sum = f32[8,8] {REDUCE.format('%put')}",
    )

    assert (row.kind, row.opcode) == (Kind.ALL_GATHER, "all-reduce")
    assert (row.payload_bytes, row.wire_bytes) == (WHOLE_BYTES, WHOLE_BYTES * 6 / 4)


def test_shards_padded_in_a_fusion_are_a_gather() -> None:
    fused = """
%fused (p: f32[2,8], z: f32[], i: s32[]) -> f32[8,8] {
  %p = f32[2,8] parameter(0)
  %z = f32[] parameter(1)
  %i = s32[] parameter(2)
  %o = s32[] constant(0)
  %zs = f32[8,8] broadcast(%z), dimensions={}
  %put = f32[8,8] dynamic-update-slice(%zs, %p, %i, %o)
  ROOT %b = f32[8,8] bitcast(%put)
}
"""
    row = _row(
        "%f = f32[8,8] fusion(%part, %zero, %mine), kind=kLoop, calls=%fused",
        "%copy = f32[8,8] copy(%f)",
        f"ROOT %sum = f32[8,8] {REDUCE.format('%copy')}",
        computations=fused,
    )

    assert row.kind is Kind.ALL_GATHER


@pytest.mark.parametrize(
    "put",
    [
        "dynamic-update-slice(%ones, %part, %mine, %origin)",
        "dynamic-update-slice(%zeros, %part, %scalar, %origin)",
        "add(%zeros, %whole)",
    ],
    ids=["not among zeros", "not in a place of its own", "not a part"],
)
def test_other_sums_are_reductions(put: str) -> None:
    row = _row(f"%put = f32[8,8] {put}", f"ROOT %sum = f32[8,8] {REDUCE.format('%put')}")

    assert (row.kind, row.opcode) == (Kind.ALL_REDUCE, "all-reduce")


SLICE = "dynamic-slice({}, %mine, %origin), dynamic_slice_sizes={{2,8}}"


def test_a_sum_of_which_each_device_keeps_its_shard_is_a_scatter() -> None:
    """The payload is the whole array, and the wire bytes are those of an all-reduce."""
    row = _row(
        f"%sum = f32[8,8] {REDUCE.format('%whole')}",
        f"ROOT %kept = f32[2,8] {SLICE.format('%sum')}",
    )

    assert (row.kind, row.opcode, row.shape) == (Kind.REDUCE_SCATTER, "all-reduce", (8, 8))
    assert (row.payload_bytes, row.wire_bytes) == (WHOLE_BYTES, WHOLE_BYTES * 6 / 4)


def test_a_conversion_and_slice_in_a_fusion_are_a_scatter() -> None:
    """XLA for CPU sums in float32 and then converts."""
    fused = """
%fused (p: f32[8,8], i: s32[], r: bf16[2,8]) -> bf16[2,8] {
  %p = f32[8,8] parameter(0)
  %i = s32[] parameter(1)
  %r = bf16[2,8] parameter(2)
  %o = s32[] constant(0)
  %c = bf16[8,8] convert(%p)
  %mine = bf16[2,8] dynamic-slice(%c, %i, %o), dynamic_slice_sizes={2,8}
  ROOT %s = bf16[2,8] add(%mine, %r)
}
"""
    row = _row(
        f"%sum = f32[8,8] {REDUCE.format('%whole')}",
        "%r = bf16[2,8] convert(%part)",
        "ROOT %f = bf16[2,8] fusion(%sum, %mine, %r), kind=kLoop, calls=%fused",
        computations=fused,
    )

    assert row.kind is Kind.REDUCE_SCATTER


PREFETCH = (
    "%bytes = s8[256] bitcast(%sum)",
    "%start0 = ((s8[256]), s8[192], s32[]) slice-start(%bytes), slice={[0:192]}",
    "%start1 = ((s8[256]), s8[64], s32[]) slice-start(%bytes), slice={[192:256]}",
    "%done0 = s8[192] slice-done(%start0)",
    "%done1 = s8[64] slice-done(%start1)",
)


@pytest.mark.parametrize(
    ("joined", "kind"), [("ConcatBitcast", Kind.REDUCE_SCATTER), ("Other", Kind.ALL_REDUCE)]
)
def test_a_shard_of_a_sum_that_is_prefetched_in_slices_is_a_scatter(joined, kind) -> None:
    """As libtpu 0.0.42.1 moves the reduced experts of Kimi-K2 on TPU7x to VMEM, in four slices."""
    row = _row(
        f"%sum = f32[8,8] {REDUCE.format('%whole')}",
        *PREFETCH,
        f'%joined = f32[8,8] custom-call(%done0, %done1), custom_call_target="{joined}"',
        f"ROOT %kept = f32[2,8] {SLICE.format('%joined')}",
    )

    assert row.kind is kind


def test_a_sum_without_a_name_takes_that_of_its_operand_not_of_the_fusion() -> None:
    """A fusion has the name of its costliest instruction; the compiler drops names in rewrites."""
    scopes = "jit(f)/decode/layer1"
    fused = f"""
%fused (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  %q = f32[8,8] parameter(1)
  %d = f32[8,8] multiply(%p, %q), metadata={{op_name="{scopes}/moe.shared/dot_general"}}
  %a = f32[8,8] add(%p, %d), metadata={{op_name="{scopes}/moe.combine/add"}}
  ROOT %b = f32[8,8] bitcast(%a)
}}
"""
    named = f'metadata={{op_name="{scopes}/moe.shared/dot_general"}}'
    row = _row(
        f"%f = f32[8,8] fusion(%whole, %ones), kind=kOutput, calls=%fused, {named}",
        f"ROOT %sum = f32[8,8] {REDUCE.format('%f').partition(', metadata')[0]}",
        computations=fused,
    )

    assert (row.layer, row.part) == (1, Part.MOE_COMBINE)


def test_a_scatter_without_a_name_takes_that_of_its_reducer_and_keeps_unit_dims() -> None:
    """As libtpu 0.0.42.1 writes the tp reduction after experts in decode with sp over the batch."""
    named = 'metadata={op_name="decode/while/body/layers0-3/moe.combine/reduce_scatter"}'
    of_experts = 'metadata={op_name="jit(f)/decode/while/body/layers0-3/moe.experts/dot_general"}'
    added = f"""
%of_combine (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0), {named}
  %y = f32[] parameter(1), {named}
  ROOT %z = f32[] add(%x, %y)
}}
"""
    nameless = REDUCE.partition(", to_apply")[0] + ", to_apply=%of_combine"
    row = _row(
        f"%rows = f32[8,8] multiply(%whole, %ones), {of_experts}",
        "%operand = f32[8,1,8] bitcast(%rows)",
        f"%sum = f32[8,1,8] {nameless.format('%operand')}",
        "%kept = f32[2,1,8] dynamic-slice(%sum, %mine, %origin, %origin), dynamic_slice_sizes={2,1,8}",
        "ROOT %out = f32[2,1,8] negate(%kept)",
        computations=added,
    )

    assert (row.kind, row.part, row.shape) == (Kind.REDUCE_SCATTER, Part.MOE_COMBINE, (8, 1, 8))
    assert row.inserted_by == "program"


def test_a_sum_with_a_use_of_the_whole_is_no_scatter() -> None:
    row = _row(
        f"%sum = f32[8,8] {REDUCE.format('%whole')}",
        f"%kept = f32[2,8] {SLICE.format('%sum')}",
        "ROOT %all = f32[8,8] negate(%sum)",
    )

    assert row.kind is Kind.ALL_REDUCE


def test_a_sum_with_the_same_slice_on_all_devices_is_no_scatter() -> None:
    """For instance, the last position of a sequence."""
    row = _row(
        f"%sum = f32[8,8] {REDUCE.format('%whole')}",
        f"ROOT %kept = f32[2,8] {SLICE.format('%sum').replace('%mine', '%scalar')}",
    )

    assert row.kind is Kind.ALL_REDUCE


def test_an_asynchronous_pair_is_one_row() -> None:
    row = _row(
        f"%start = f32[8,8] {REDUCE.format('%whole').replace('all-reduce(', 'all-reduce-start(')}",
        "ROOT %done = f32[8,8] all-reduce-done(%start)",
    )

    assert (row.kind, row.opcode, row.is_async, row.hlo_name) == (
        Kind.ALL_REDUCE,
        "all-reduce",
        True,
        "start",
    )


def test_a_gather_start_has_the_shape_of_its_result() -> None:
    row = _row(
        (
            "%start = (f32[2,8], f32[8,8]) all-gather-start(%part), channel_id=1, "
            "replica_groups={{0,1,2,3}}, dimensions={0}, use_global_device_ids=true, "
            'metadata={op_name="jit(f)/prefill/layer0/mlp/all_gather"}'
        ),
        "ROOT %done = f32[8,8] all-gather-done(%start)",
    )

    assert (row.shape, row.hlo_shape, row.inserted_by) == ((8, 8), None, "program")


def test_a_collective_in_an_async_computation_is_one_row() -> None:
    """The start, update and done name the same computation."""
    wrapped = """
%wrapped (p: f32[2,8]) -> f32[8,8] {
  %p = f32[2,8] parameter(0)
  ROOT %gather = f32[8,8] all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, use_global_device_ids=true
}
"""
    row = _row(
        (
            "%s = ((f32[2,8]), f32[8,8], s32[]) async-start(%part), calls=%wrapped, "
            'metadata={op_name="jit(f)/prefill/layer3/attn/all_gather"}'
        ),
        "%u = ((f32[2,8]), f32[8,8], s32[]) async-update(%s), calls=%wrapped",
        "ROOT %d = f32[8,8] async-done(%u), calls=%wrapped",
        computations=wrapped,
    )

    assert (row.layer, row.kind, row.is_async, row.hlo_name) == (3, Kind.ALL_GATHER, True, "s")
    assert row.axis_reason is None


def test_an_all_to_all_of_a_tuple_is_one_row_without_a_shape() -> None:
    row = _row(
        "ROOT %a2a = (f32[2,8], f32[2,8], f32[2,8], f32[2,8]) all-to-all(%part, %part, %part, "
        "%part), channel_id=1, replica_groups={{0,1,2,3}}"
    )

    assert (row.kind, row.shape, row.payload_bytes) == (Kind.ALL_TO_ALL, None, 4 * 2 * 8 * 4)
    assert row.wire_bytes == 3 / 4 * 4 * 2 * 8 * 4


RAGGED = "jit(f)/prefill/layer0/moe.dispatch/ragged_all_to_all"


@pytest.mark.parametrize(("given", "taken"), [(4, 32), (32, 4)])
def test_a_ragged_all_to_all_moves_at_most_its_smaller_buffer(given: int, taken: int) -> None:
    row = _row(
        f"%rows = f32[{given},2,128] broadcast(%zero), dimensions={{}}",
        f"%buffer = f32[{taken},2,128] broadcast(%zero), dimensions={{}}",
        (
            f"ROOT %r = f32[{taken},2,128] ragged-all-to-all(%rows, %buffer, %table, %table, "
            "%table, %table), channel_id=1, replica_groups={{0,1,2,3}}, "
            f'metadata={{op_name="{RAGGED}"}}'
        ),
    )

    assert (row.kind, row.opcode, row.shape) == (Kind.ALL_TO_ALL, "ragged-all-to-all", (4, 256))
    assert row.payload_bytes == 4 * 256 * 4
    assert row.wire_bytes == Fraction(3, 4) * 4 * 256 * 4


def test_padding_of_a_ragged_all_to_all_counts_as_wire_bytes_only() -> None:
    row = _row(
        "%rows = f32[4,180] broadcast(%zero), dimensions={}",
        "%buffer = f32[32,2,128] broadcast(%zero), dimensions={}",
        f'%wide = f32[4,256] pad(%rows, %zero), padding=0_0x0_76, metadata={{op_name="{RAGGED}"}}',
        f'%halves = f32[4,2,128] reshape(%wide), metadata={{op_name="{RAGGED}"}}',
        (
            "ROOT %r = f32[32,2,128] ragged-all-to-all(%halves, %buffer, %table, %table, %table, "
            "%table), channel_id=1, replica_groups={{0,1,2,3}}, "
            f'metadata={{op_name="{RAGGED}"}}'
        ),
    )

    assert (row.shape, row.payload_bytes) == ((4, 180), 4 * 180 * 4)
    assert row.wire_bytes == Fraction(3, 4) * 4 * 256 * 4


def test_a_separate_device_dim_is_merged_before_a_reshape_of_the_program() -> None:
    """The program gathers [8,8] and reshapes it to [8,1,8]; the compiler writes one reshape for both."""
    row = _row(
        "%rows = f32[1,2,8] reshape(%part)",
        (
            "%g = f32[4,2,8] all-gather(%rows), channel_id=1, replica_groups={{0,1,2,3}}, "
            "dimensions={0}, "
            'metadata={op_name="jit(f)/prefill/layer0/moe.combine/all_gather"}'
        ),
        (
            "ROOT %r = f32[8,1,8] reshape(%g), "
            'metadata={op_name="jit(f)/prefill/layer0/moe.combine/reshape"}'
        ),
    )

    assert (row.kind, row.shape, row.hlo_shape) == (Kind.ALL_GATHER, (8, 8), "f32[4,2,8]")


@pytest.mark.parametrize(("move", "kept"), [("copy", "4,1,8"), ("bitcast", "4,8")])
def test_a_move_after_a_gather_keeps_its_unit_dims(move: str, kept: str) -> None:
    """Two rows on two devices: the first dim is as large as the group, but is the program's."""
    row = _row(
        "%mine2 = f32[1,1,8] broadcast(%zero), dimensions={}",
        (
            "%g = f32[4,1,8] all-gather(%mine2), channel_id=1, replica_groups={{0,1,2,3}}, "
            'dimensions={0}, metadata={op_name="jit(f)/prefill/layer0/attn/all_gather"}'
        ),
        f"ROOT %kept = f32[{kept}] {move}(%g)",
    )

    assert row.shape == (4, 1, 8)


def test_a_gather_with_two_uses_has_the_shape_without_the_unit_dim() -> None:
    """Logits of a pipeline stage, used directly and as the one microbatch of a buffer."""
    gather = (
        "all-gather(%part), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="
        '"jit(f)/prefill/lm_head/all_gather"}'
    )
    text = f"""\
HloModule m, is_scheduled=true, num_partitions=4

ENTRY %main (part: bf16[1,2,8]) -> (bf16[8,8], bf16[1,8,8]) {{
  %part = bf16[1,2,8] parameter(0)
  %gathered = bf16[4,2,8] {gather}
  %laid = bf16[4,2,8] copy(%gathered), metadata={{op_name="jit(f)/prefill/lm_head/all_gather"}}
  %flat = bf16[8,8] reshape(%laid)
  %turned = bf16[2,32] bitcast(%flat)
  %buffer = bf16[1,2,32] bitcast(%flat)
  ROOT %both = (bf16[2,32], bf16[1,2,32]) tuple(%turned, %buffer)
}}
"""
    (row,) = _read(text)
    assert row.shape == (2, 32)


def test_a_sum_sent_as_tiles_has_its_computed_shape() -> None:
    """As libtpu 0.0.42.1 writes the sum of the last position over cp across two slices."""
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum.37_0",'
        '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}, '
        'metadata={op_name="jit(f)/prefill/lm_head/psum"}'
    )
    text = f"""\
HloModule m, is_scheduled=true, num_partitions=4

%fused (rows: bf16[8,1,3072], zeros: bf16[8,1,3072], is_last: pred[8,1,3072]) -> bf16[24,8,128] {{
  %rows = bf16[8,1,3072] parameter(0)
  %zeros = bf16[8,1,3072] parameter(1)
  %is_last = pred[8,1,3072] parameter(2)
  %kept = bf16[8,1,3072] select(%is_last, %rows, %zeros)
  ROOT %tiles = bf16[24,8,128] bitcast(%kept)
}}

ENTRY %main (a: bf16[8,1,3072], b: bf16[8,1,3072], c: pred[8,1,3072]) -> bf16[24,8,128] {{
  %a = bf16[8,1,3072] parameter(0)
  %b = bf16[8,1,3072] parameter(1)
  %c = pred[8,1,3072] parameter(2)
  %part = bf16[24,8,128] fusion(%a, %b, %c), kind=kLoop, calls=%fused
  %token = token[] after-all()
  %send = (bf16[24,8,128], u32[], token[]) send(%part, %token), channel_id=6, {attributes}
  %recv = (bf16[24,8,128], u32[], token[]) recv(%token), channel_id=5, {attributes}
  %sent = token[] send-done(%send), channel_id=6, is_host_transfer=true
  %done = (bf16[24,8,128], token[]) recv-done(%recv), channel_id=5, is_host_transfer=true
  ROOT %sum = bf16[24,8,128] get-tuple-element(%done), index=0
}}
"""
    crosses = lambda groups: any(min(g) < 4 <= max(g) for g in groups)  # noqa: E731
    (row,) = _read(text, crosses, cp=2, tp=4)

    assert (row.kind, row.axis, row.crosses_slices) == (Kind.ALL_REDUCE, "cp", True)
    assert (row.shape, row.payload_bytes) == ((8, 3072), 8 * 3072 * 2)


def test_a_gather_that_the_compiler_repeats_has_a_row_of_its_inserter() -> None:
    """libtpu 0.0.42.1 names it so in prefill of GLM-5.2 on v5e, where the HBM is nearly full."""
    gather = (
        "all-gather(%part), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, "
        'use_global_device_ids=true, metadata={op_name="jit(f)/prefill/layer0/attn/all_gather"}'
    )
    rows = _rows(
        f"%all-gather.69 = f32[8,8] {gather}",
        f"%all-gather.69.remat = f32[8,8] {gather.replace('channel_id=1', 'channel_id=2')}",
        "ROOT %out = f32[8,8] add(%all-gather.69, %all-gather.69.remat)",
    )

    assert [(row.inserted_by, row.count) for row in rows] == [
        ("program", 1),
        ("rematerialization", 1),
    ]


PAIR_TEXT = TEXT.replace("num_partitions=4", "num_partitions=8")
OVER_DP = REDUCE.replace("replica_groups=[1,4]<=[4]", "replica_groups=[2,4]<=[4,2]T(1,0)")
HALF = "dynamic-slice(%sum, %mine, %origin), dynamic_slice_sizes={4,8}"


@pytest.mark.parametrize(
    ("use", "computations", "dropped"),
    [
        (f"ROOT %kept = f32[4,8] {HALF}", "", (Fraction(1, 2), "tp")),
        (
            "ROOT %kept = f32[4,8] fusion(%sum, %mine, %origin), kind=kLoop, calls=%keep",
            """
%keep (p: f32[8,8], q: s32[], r: s32[]) -> f32[4,8] {
  %p = f32[8,8] parameter(0)
  %q = s32[] parameter(1)
  %r = s32[] parameter(2)
  ROOT %slice = f32[4,8] dynamic-slice(%p, %q, %r), dynamic_slice_sizes={4,8}
}
""",
            (Fraction(1, 2), "tp"),
        ),
        (
            "ROOT %kept = f32[4,8] dynamic-slice(%sum, %scalar, %origin), dynamic_slice_sizes={4,8}",
            "",
            (None, None),
        ),
        ("ROOT %kept = f32[8,8] add(%sum, %whole)", "", (None, None)),
        ("ROOT %kept = f32[8,8] copy(%sum)", "", (Fraction(1, 2), "tp")),
    ],
    ids=[
        "slice",
        "fusion",
        "the same half everywhere",
        "whole",
        "returned beside half an argument",
    ],
)
def test_a_reduction_of_more_than_devices_keep_names_the_axis_that_drops_it(
    use, computations, dropped
) -> None:
    weight = "%weight = f32[4,8] parameter(2)"
    body = f"  {weight}\n  %sum = f32[8,8] {OVER_DP.format('%whole')}\n  {use}"
    text = PAIR_TEXT.format(body=body, computations=computations)
    collectives = module_collectives(
        parse_hlo(text, "m.hlo"),
        mesh=Mesh(axes=(("dp", 4), ("tp", 2))),
        crosses_slices=lambda _: None,
    )

    ((_, moved),) = reshardings(collectives).items()

    assert (moved.dropped_frac, moved.dropped_over) == dropped
    assert moved.is_returned == ("copy" in use)
