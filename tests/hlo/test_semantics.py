"""The effect of all-reduces and other collectives, in minimal texts."""

from fractions import Fraction

import pytest
from made_hlo import module_text, rows_in

from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part
from meshscope.plans.mesh import parse_mesh
from meshscope.readers.hlo.collectives import module_collectives, reshardings
from meshscope.readers.hlo.parse import parse_hlo

ENTRY = """\
  %part = f32[2,8] parameter(0)
  %whole = f32[8,8] parameter(1)
  %zero = f32[] constant(0)
  %one = f32[] constant(1)
  %origin = s32[] constant(0)
  %zeros = f32[8,8] broadcast(%zero), dimensions={}
  %ones = f32[8,8] broadcast(%one), dimensions={}
  %id = u32[] partition-id()
  %table = s32[4] constant({0,2,4,6})
  %entry = s32[1] dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %mine = s32[] reshape(%entry)
  %scalar = s32[] constant(2)
"""
GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}"


def _text(*body: str, computations: str = "", n_devices: int = 4) -> str:
    lines = "\n".join(f"  {line}" for line in body)
    return module_text(ENTRY + lines, computations, header=f", num_partitions={n_devices}")


REDUCE = (
    "all-reduce({}), channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true, "
    'to_apply=%add, metadata={{op_name="jit(f)/prefill/layer0/mlp/dot_general"}}'
)


def _row(*body: str, computations: str = "") -> Collective:
    (row,) = _rows(*body, computations=computations)
    return row


def _rows(*body: str, computations: str = "") -> list[Collective]:
    return rows_in(_text(*body, computations=computations), "tp=4")


def _named(scope: str, layer: str = "prefill/layer0") -> str:
    return f'metadata={{op_name="jit(f)/{layer}/{scope}"}}'


WHOLE_BYTES = 8 * 8 * 4


PADDED = """
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


@pytest.mark.parametrize(
    ("put", "kind"),
    [
        ("dynamic-update-slice(%zeros, %part, %mine, %origin)", Kind.ALL_GATHER),
        ("fusion(%part, %zero, %mine), kind=kLoop, calls=%fused", Kind.ALL_GATHER),
        ("dynamic-update-slice(%ones, %part, %mine, %origin)", Kind.ALL_REDUCE),
        ("dynamic-update-slice(%zeros, %part, %scalar, %origin)", Kind.ALL_REDUCE),
        ("add(%zeros, %whole)", Kind.ALL_REDUCE),
    ],
    ids=["zero-padded", "fused", "not among zeros", "not in a place of its own", "not a part"],
)
def test_only_a_sum_of_zero_padded_shards_is_a_gather(put: str, kind: Kind) -> None:
    row = _row(
        f"%put = f32[8,8] {put}",
        "%copy = f32[8,8] copy(%put)",
        f"ROOT %sum = f32[8,8] {REDUCE.format('%copy')}",
        computations=PADDED,
    )
    assert (row.kind, row.opcode) == (kind, "all-reduce")
    assert (row.payload_bytes, row.wire_bytes) == (WHOLE_BYTES, WHOLE_BYTES * 6 / 4)


SLICE = "dynamic-slice({}, %mine, %origin), dynamic_slice_sizes={{2,8}}"


# XLA for CPU sums in float32 and then converts.
CONVERTED = """
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
KEPT = f"ROOT %kept = f32[2,8] {SLICE.format('%sum')}"


def _prefetched(target: str) -> tuple[str, ...]:
    """As libtpu 0.0.42.1 moves the reduced experts of Kimi-K2 on TPU7x to VMEM, in four slices."""
    return (
        "%bytes = s8[256] bitcast(%sum)",
        "%start0 = ((s8[256]), s8[192], s32[]) slice-start(%bytes), slice={[0:192]}",
        "%start1 = ((s8[256]), s8[64], s32[]) slice-start(%bytes), slice={[192:256]}",
        "%done0 = s8[192] slice-done(%start0)",
        "%done1 = s8[64] slice-done(%start1)",
        f'%joined = f32[8,8] custom-call(%done0, %done1), custom_call_target="{target}"',
        f"ROOT %kept = f32[2,8] {SLICE.format('%joined')}",
    )


SCATTERS = {
    "each device keeps its shard": (KEPT,),
    "converted and sliced in a fusion": (
        "%r = bf16[2,8] convert(%part)",
        "ROOT %f = bf16[2,8] fusion(%sum, %mine, %r), kind=kLoop, calls=%fused",
    ),
    "prefetched in slices": _prefetched("ConcatBitcast"),
}
# The same slice on all devices is, for instance, the last position of a sequence.
REDUCTIONS = {
    "slices joined otherwise": _prefetched("Other"),
    "a use of the whole": (KEPT.removeprefix("ROOT "), "ROOT %all = f32[8,8] negate(%sum)"),
    "the same slice on all devices": (KEPT.replace("%mine", "%scalar"),),
}


@pytest.mark.parametrize("use", SCATTERS | REDUCTIONS)
def test_a_sum_of_which_each_device_keeps_its_shard_is_a_scatter(use: str) -> None:
    """The payload is the whole array, and the wire bytes are those of an all-reduce."""
    lines = (SCATTERS | REDUCTIONS)[use]
    row = _row(f"%sum = f32[8,8] {REDUCE.format('%whole')}", *lines, computations=CONVERTED)
    kind = Kind.REDUCE_SCATTER if use in SCATTERS else Kind.ALL_REDUCE
    assert (row.kind, row.opcode, row.shape) == (kind, "all-reduce", (8, 8))
    assert (row.payload_bytes, row.wire_bytes) == (WHOLE_BYTES, WHOLE_BYTES * 6 / 4)


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


def test_an_asynchronous_pair_is_one_row() -> None:
    start = REDUCE.format("%whole").replace("all-reduce(", "all-reduce-start(")
    row = _row(f"%start = f32[8,8] {start}", "ROOT %done = f32[8,8] all-reduce-done(%start)")
    facts = (row.kind, row.opcode, row.is_async, row.hlo_name)
    assert facts == (Kind.ALL_REDUCE, "all-reduce", True, "start")


def test_a_gather_start_has_the_shape_of_its_result() -> None:
    row = _row(
        f"%start = (f32[2,8], f32[8,8]) all-gather-start(%part), {GROUPS}, dimensions={{0}}, "
        f"use_global_device_ids=true, {_named('mlp/all_gather')}",
        "ROOT %done = f32[8,8] all-gather-done(%start)",
    )
    assert (row.shape, row.hlo_shape, row.inserted_by) == ((8, 8), None, "program")


def test_a_collective_in_an_async_computation_is_one_row() -> None:
    """The start, update and done name the same computation."""
    wrapped = f"""
%wrapped (p: f32[2,8]) -> f32[8,8] {{
  %p = f32[2,8] parameter(0)
  ROOT %gather = f32[8,8] all-gather(%p), {GROUPS}, dimensions={{0}}, use_global_device_ids=true
}}
"""
    row = _row(
        "%s = ((f32[2,8]), f32[8,8], s32[]) async-start(%part), calls=%wrapped, "
        + _named("attn/all_gather", "prefill/layer3"),
        "%u = ((f32[2,8]), f32[8,8], s32[]) async-update(%s), calls=%wrapped",
        "ROOT %d = f32[8,8] async-done(%u), calls=%wrapped",
        computations=wrapped,
    )
    assert (row.layer, row.kind, row.is_async, row.hlo_name) == (3, Kind.ALL_GATHER, True, "s")
    assert row.axis_reason is None


def test_an_all_to_all_of_a_tuple_is_one_row_without_a_shape() -> None:
    parts = "(f32[2,8], f32[2,8], f32[2,8], f32[2,8])"
    row = _row(f"ROOT %a2a = {parts} all-to-all(%part, %part, %part, %part), {GROUPS}")

    assert (row.kind, row.shape, row.payload_bytes) == (Kind.ALL_TO_ALL, None, 4 * 2 * 8 * 4)
    assert row.wire_bytes == 3 / 4 * 4 * 2 * 8 * 4


RAGGED = _named("moe.dispatch/ragged_all_to_all")


def _exchange(taken: int, operand: str) -> str:
    return (
        f"ROOT %r = f32[{taken},2,128] ragged-all-to-all(%{operand}, %buffer, %table, %table, "
        f"%table, %table), {GROUPS}, {RAGGED}"
    )


@pytest.mark.parametrize(("given", "taken"), [(4, 32), (32, 4)])
def test_a_ragged_all_to_all_moves_at_most_its_smaller_buffer(given: int, taken: int) -> None:
    row = _row(
        f"%rows = f32[{given},2,128] broadcast(%zero), dimensions={{}}",
        f"%buffer = f32[{taken},2,128] broadcast(%zero), dimensions={{}}",
        _exchange(taken, "rows"),
    )
    assert (row.kind, row.opcode, row.shape) == (Kind.ALL_TO_ALL, "ragged-all-to-all", (4, 256))
    assert (row.payload_bytes, row.wire_bytes) == (4 * 256 * 4, Fraction(3, 4) * 4 * 256 * 4)


def test_padding_of_a_ragged_all_to_all_counts_as_wire_bytes_only() -> None:
    row = _row(
        "%rows = f32[4,180] broadcast(%zero), dimensions={}",
        "%buffer = f32[32,2,128] broadcast(%zero), dimensions={}",
        f"%wide = f32[4,256] pad(%rows, %zero), padding=0_0x0_76, {RAGGED}",
        f"%halves = f32[4,2,128] reshape(%wide), {RAGGED}",
        _exchange(32, "halves"),
    )
    assert (row.shape, row.payload_bytes) == ((4, 180), 4 * 180 * 4)
    assert row.wire_bytes == Fraction(3, 4) * 4 * 256 * 4


@pytest.mark.parametrize(
    ("mine", "gathered", "used", "shape"),
    [
        # The program gathers [8,8] and reshapes it; the compiler writes one reshape for both.
        (
            "f32[1,2,8] reshape(%part)",
            "4,2,8",
            f"f32[8,1,8] reshape(%g), {_named('attn/reshape')}",
            (8, 8),
        ),
        # Two rows on two devices: the first dim is as large as the group, but is the program's.
        ("f32[1,1,8] broadcast(%zero), dimensions={}", "4,1,8", "f32[4,1,8] copy(%g)", (4, 1, 8)),
        ("f32[1,1,8] broadcast(%zero), dimensions={}", "4,1,8", "f32[4,8] bitcast(%g)", (4, 1, 8)),
    ],
    ids=["reshape", "copy", "bitcast"],
)
def test_a_separate_device_dim_is_merged_and_unit_dims_are_kept(
    mine, gathered, used, shape
) -> None:
    row = _row(
        f"%rows = {mine}",
        f"%g = f32[{gathered}] all-gather(%rows), {GROUPS}, dimensions={{0}}, {_named('attn/all_gather')}",
        f"ROOT %r = {used}",
    )
    assert (row.kind, row.shape) == (Kind.ALL_GATHER, shape)
    assert row.hlo_shape == (None if len(shape) == 3 else f"f32[{gathered}]")


def test_a_gather_with_two_uses_has_the_shape_without_the_unit_dim() -> None:
    """Logits of a pipeline stage, used directly and as the one microbatch of a buffer."""
    named = _named("lm_head/all_gather", "prefill")
    row = _row(
        "%mine1 = bf16[1,2,8] parameter(2)",
        f"%gathered = bf16[4,2,8] all-gather(%mine1), {GROUPS}, dimensions={{0}}, {named}",
        f"%laid = bf16[4,2,8] copy(%gathered), {named}",
        "%flat = bf16[8,8] reshape(%laid)",
        "%turned = bf16[2,32] bitcast(%flat)",
        "%buffer = bf16[1,2,32] bitcast(%flat)",
        "ROOT %both = (bf16[2,32], bf16[1,2,32]) tuple(%turned, %buffer)",
    )
    assert row.shape == (2, 32)


def test_a_sum_sent_as_tiles_has_its_computed_shape() -> None:
    """As libtpu 0.0.42.1 writes the sum of the last position over cp across two slices."""
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum.37_0",'
        '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}, '
        + _named("lm_head/psum", "prefill")
    )
    fused = """
%fused (rows: bf16[8,1,3072], zeros: bf16[8,1,3072], is_last: pred[8,1,3072]) -> bf16[24,8,128] {
  %rows = bf16[8,1,3072] parameter(0)
  %zeros = bf16[8,1,3072] parameter(1)
  %is_last = pred[8,1,3072] parameter(2)
  %kept = bf16[8,1,3072] select(%is_last, %rows, %zeros)
  ROOT %tiles = bf16[24,8,128] bitcast(%kept)
}
"""
    text = _text(
        "%a = bf16[8,1,3072] parameter(2)",
        "%b = bf16[8,1,3072] parameter(3)",
        "%c = pred[8,1,3072] parameter(4)",
        "%tiles = bf16[24,8,128] fusion(%a, %b, %c), kind=kLoop, calls=%fused",
        "%token = token[] after-all()",
        f"%send = (bf16[24,8,128], u32[], token[]) send(%tiles, %token), channel_id=6, {attributes}",
        f"%recv = (bf16[24,8,128], u32[], token[]) recv(%token), channel_id=5, {attributes}",
        "%sent = token[] send-done(%send), channel_id=6, is_host_transfer=true",
        "%done = (bf16[24,8,128], token[]) recv-done(%recv), channel_id=5, is_host_transfer=true",
        "ROOT %sum = bf16[24,8,128] get-tuple-element(%done), index=0",
        computations=fused,
    )
    crosses = lambda groups: any(min(g) < 4 <= max(g) for g in groups)  # noqa: E731
    (row,) = rows_in(text, "cp=2,tp=4", crosses_slices=crosses)
    assert (row.kind, row.axis, row.crosses_slices) == (Kind.ALL_REDUCE, "cp", True)
    assert (row.shape, row.payload_bytes) == ((8, 3072), 8 * 3072 * 2)


def test_a_gather_that_the_compiler_repeats_has_a_row_of_its_inserter() -> None:
    """libtpu 0.0.42.1 names it so in prefill of GLM-5.2 on v5e, where the HBM is nearly full."""
    gather = f"all-gather(%part), {GROUPS}, dimensions={{0}}, use_global_device_ids=true, "
    gather += _named("attn/all_gather")
    rows = _rows(
        f"%all-gather.69 = f32[8,8] {gather}",
        f"%all-gather.69.remat = f32[8,8] {gather.replace('channel_id=1', 'channel_id=2')}",
        "ROOT %out = f32[8,8] add(%all-gather.69, %all-gather.69.remat)",
    )
    made_by = [(row.inserted_by, row.count) for row in rows]
    assert made_by == [("program", 1), ("rematerialization", 1)]


OVER_DP = REDUCE.replace("replica_groups=[1,4]<=[4]", "replica_groups=[2,4]<=[4,2]T(1,0)")
HALF = "f32[4,8] dynamic-slice(%sum, %mine, %origin), dynamic_slice_sizes={4,8}"
# A slice of half of the sum in a fusion.
KEEP = """
%keep (p: f32[8,8], q: s32[], r: s32[]) -> f32[4,8] {
  %p = f32[8,8] parameter(0)
  %q = s32[] parameter(1)
  %r = s32[] parameter(2)
  ROOT %slice = f32[4,8] dynamic-slice(%p, %q, %r), dynamic_slice_sizes={4,8}
}
"""


@pytest.mark.parametrize(
    ("use", "is_dropped"),
    [
        (HALF, True),
        ("f32[4,8] fusion(%sum, %mine, %origin), kind=kLoop, calls=%keep", True),
        (HALF.replace("%mine", "%scalar"), False),
        ("f32[8,8] add(%sum, %whole)", False),
        ("f32[8,8] copy(%sum)", True),
    ],
    ids=["slice", "fusion", "same half everywhere", "whole", "returned beside half an argument"],
)
def test_a_reduction_of_more_than_devices_keep_names_the_axis_that_drops_it(
    use, is_dropped
) -> None:
    text = _text(
        "%weight = f32[4,8] parameter(2)",
        f"%sum = f32[8,8] {OVER_DP.format('%whole')}",
        f"ROOT %kept = {use}",
        computations=KEEP,
        n_devices=8,
    )
    collectives = module_collectives(
        parse_hlo(text, "m.hlo"), mesh=parse_mesh("dp=4,tp=2"), crosses_slices=lambda _: None
    )
    ((_, moved),) = reshardings(collectives).items()
    dropped = (Fraction(1, 2), "tp") if is_dropped else (None, None)
    assert (moved.dropped_frac, moved.dropped_over) == dropped
    assert moved.is_returned == ("copy" in use)
