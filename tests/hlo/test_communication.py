"""Communication in every form: sends and recvs, custom calls, opcodes of other versions, modes of groups."""

import pytest

from meshscope.analysis.budget import Filter
from meshscope.errors import ParseError
from meshscope.events.collective import Collective, Effect
from meshscope.events.enums import Kind, Phase
from meshscope.plans.mesh import Mesh, parse_mesh
from meshscope.readers.hlo.collectives import module_collectives, rows_of
from meshscope.readers.hlo.communication import other_operations
from meshscope.readers.hlo.parse import parse_hlo

ARRAY = "f32[1024,1024]{1,0}"
N_BYTES = 1024 * 1024 * 4
RING = ((0, 1), (1, 2), (2, 3))
TEXT = """\
HloModule m, is_scheduled=true{header}
{computations}
ENTRY main {{
  a = {array} parameter(0)
  tok = token[] after-all()
{body}
}}
"""


def text_of(body: str, *, header: str = ", num_partitions=4", computations: str = "") -> str:
    return TEXT.format(header=header, array=ARRAY, body=body, computations=computations)


def rows(text: str, mesh: str = "x=4") -> list[Collective]:
    layout: Mesh = parse_mesh(mesh)
    module = parse_hlo(text, "m.hlo")
    collectives = module_collectives(module, mesh=layout, crosses_slices=lambda _: None)
    return rows_of(collectives, n_steps_of={}, crosses_slices=lambda _: None)


def others(text: str) -> list[str]:
    return [str(other) for other in other_operations(parse_hlo(text, "m.hlo"), None)]


def pair(attributes: str, *, name: str = "") -> str:
    """A send and a recv with the same attributes, as XLA schedules them on GPUs."""
    return f"""\
  r{name} = ({ARRAY}, u32[], token[]) recv(tok), {attributes}
  s{name} = ({ARRAY}, u32[], token[]) send(a, tok), {attributes}, control-predecessors={{r{name}}}
  rd{name} = ({ARRAY}, token[]) recv-done(r{name}), channel_id=1
  o{name} = {ARRAY} get-tuple-element(rd{name}), index=0
  sd{name} = token[] send-done(s{name}), channel_id=1"""


@pytest.mark.parametrize(
    "attributes",
    [
        (
            "channel_id=1, frontend_attributes="
            '{_xla_send_recv_pipeline="0",_xla_send_recv_source_target_pairs={{0,1},{1,2},{2,3}}}'
        ),
        'channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2},{2,3}}"}',
        (
            'channel_id=1, frontend_attributes={\n      _xla_send_recv_source_target_pairs="{{0, 1}, {1, 2}, '
            '{2, 3}}",\n      _xla_send_recv_validation="{{0,7},{1,8},{2,9}}"\n    }'
        ),
        "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}",
        "source_target_pairs={{0,1},{1,2},{2,3}}",
    ],
    ids=["pipeline", "quoted", "several lines", "attribute", "without a channel"],
)
def test_a_send_and_its_recv_are_one_row(attributes: str) -> None:
    (row,) = rows(text_of(pair(attributes)))

    assert (row.kind, row.opcode, row.axis, row.groups) == (Kind.PERMUTE, "send/recv", "x", RING)
    assert (row.payload_bytes, row.wire_bytes, row.group_size) == (N_BYTES, N_BYTES, 2)
    assert (row.shape, row.dtype, row.is_async, row.count) == ((1024, 1024), "f32", True, 1)
    assert others(text_of(pair(attributes))) == []


def test_a_ring_in_two_transfers_is_two_rows() -> None:
    forward = pair("channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}", name="f")
    back = pair("channel_id=2, source_target_pairs={{3,0}}", name="b")

    assert [row.groups for row in rows(text_of(f"{forward}\n{back}"))] == [RING, ((3, 0),)]


def test_a_send_in_a_loop_counts_its_iterations() -> None:
    loop = f"""
body {{
  p = (s32[], {ARRAY}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  a = {ARRAY} get-tuple-element(p), index=1
  tok = token[] after-all()
{pair("channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}")}
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT t = (s32[], {ARRAY}) tuple(next, o)
}}

condition {{
  p = (s32[], {ARRAY}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(7)
  ROOT less = pred[] compare(i, n), direction=LT
}}
"""
    body = f"""\
  zero = s32[] constant(0)
  init = (s32[], {ARRAY}) tuple(zero, a)
  ROOT w = (s32[], {ARRAY}) while(init), condition=condition, body=body"""

    (row,) = rows(text_of(body, computations=loop))

    assert (row.kind, row.count, row.wire_bytes) == (Kind.PERMUTE, 7, N_BYTES)


def test_a_send_in_an_async_computation_is_a_row() -> None:
    wrapped = f"""
%group {{
  p = {ARRAY} parameter(0)
  t = token[] parameter(1)
  r = ({ARRAY}, u32[], token[]) recv(t), channel_id=1, source_target_pairs={{{{0,1}}}}
  s = ({ARRAY}, u32[], token[]) send(p, t), channel_id=1, source_target_pairs={{{{0,1}}}}
  ROOT both = (({ARRAY}, u32[], token[]), ({ARRAY}, u32[], token[])) tuple(r, s)
}}
"""
    body = (
        f"  st = (({ARRAY}, token[]), ({ARRAY}, u32[])) async-start(a, tok), calls=%group\n"
        f"  ROOT d = {ARRAY} async-done(st)"
    )

    (row,) = rows(text_of(body, computations=wrapped))

    assert (row.kind, row.groups, row.payload_bytes) == (Kind.PERMUTE, ((0, 1),), N_BYTES)


@pytest.mark.parametrize(
    ("opcode", "kind", "wire_bytes"), [("send", Kind.SEND, N_BYTES), ("recv", Kind.RECV, 0)]
)
def test_one_side_alone_has_a_row_with_unknown_devices(opcode, kind, wire_bytes) -> None:
    operands = "a, tok" if opcode == "send" else "tok"
    body = f"  ROOT t = ({ARRAY}, u32[], token[]) {opcode}({operands}), channel_id=5"

    (row,) = rows(text_of(body))

    assert (row.kind, row.groups, row.axis) == (kind, (), None)
    assert (row.payload_bytes, row.wire_bytes) == (N_BYTES, wire_bytes)
    assert "the participating devices are unknown" in (row.axis_reason or "")


COLLECTIVES = {
    "all-reduce": ("f32[4]", "to_apply=add", 2 * 16 * 3 / 4),
    "all-gather": ("f32[16]", "dimensions={0}", 64 * 3 / 4),
    "reduce-scatter": ("f32[1]", "dimensions={0}, to_apply=add", 16 * 3 / 4),
    "all-to-all": ("f32[4]", "dimensions={0}", 16 * 3 / 4),
    "collective-broadcast": ("f32[4]", "", 16),
}
ADD = """add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}
"""


@pytest.mark.parametrize("opcode", COLLECTIVES)
@pytest.mark.parametrize("groups", ["", ", replica_groups={}"], ids=["absent", "empty"])
def test_a_collective_without_groups_has_all_devices_in_one(opcode: str, groups: str) -> None:
    shape, attributes, wire_bytes = COLLECTIVES[opcode]
    body = f"""\
  b = f32[4] constant({{1,2,3,4}})
  ROOT c = {shape} {opcode}(b), channel_id=1{groups}, use_global_device_ids=true, {attributes}"""

    (row,) = rows(text_of(body, computations=ADD))

    assert (row.groups, row.group_size, row.axis) == (((0, 1, 2, 3),), 4, "x")
    assert row.wire_bytes == wire_bytes


@pytest.mark.parametrize("pairs", ["{}", "{{0,0},{1,1},{2,2},{3,3}}"])
def test_a_permute_that_stays_on_its_devices_moves_nothing(pairs: str) -> None:
    body = f"  ROOT c = {ARRAY} collective-permute(a), channel_id=1, source_target_pairs={pairs}"

    (row,) = rows(text_of(body))

    assert (row.group_size, row.wire_bytes, row.axis) == (1, 0, None)
    assert (row.axis_reason or "").startswith("no device sends to another")
    assert not Filter(axis="x").matches(row)
    assert Filter().matches(row)


def test_a_permute_without_pairs_is_refused() -> None:
    body = f"  ROOT c = {ARRAY} collective-permute(a), channel_id=1"
    with pytest.raises(ParseError, match=r"m.hlo:\d+: 'c' .* has no source_target_pairs. Give"):
        rows(text_of(body))


def test_transfers_to_the_host_are_named_and_no_rows() -> None:
    attributes = "channel_id=1, is_host_transfer=true"
    body = f"""\
{pair(attributes)}
  in = ({ARRAY}, token[]) infeed(tok)
  out = token[] outfeed(a, tok)
  ROOT c = {ARRAY} custom-call(a), custom_call_target="xla_ffi_python_cpu_callback\""""

    assert rows(text_of(body)) == []
    assert others(text_of(body)) == [
        "1 host transfer by 'recv'",
        "1 host transfer by 'send'",
        "1 host transfer by 'infeed'",
        "1 host transfer by 'outfeed'",
        "1 host transfer by 'xla_ffi_python_cpu_callback'",
    ]


def call(target: str, attributes: str = "") -> str:
    return text_of(f'  ROOT c = {ARRAY} custom-call(a), custom_call_target="{target}"{attributes}')


@pytest.mark.parametrize("attributes", ["", ", custom_call_has_side_effect=true"])
def test_an_unknown_custom_call_may_communicate(attributes: str) -> None:
    text = call("pfft3d", attributes)

    assert rows(text) == []
    assert others(text) == ["1 custom call 'pfft3d' may communicate"]
    assert others(text.replace("num_partitions=4", "num_partitions=1")) == []


@pytest.mark.parametrize(
    ("target", "attributes"),
    [
        ("Sharding", ""),
        ("SPMDFullToShardShape", ""),
        ("TopK", ""),
        ("xla.sdy.FuncResultSharding", ""),
        ("__cublas$gemm", ""),
        ("__cudnn$fmhaSoftmax", ""),
        ("lapack_sgetrf_ffi", ""),
        ("tpu_custom_call", ', backend_config={"custom_call_config":{"body":"TUzv"}}'),
        (
            "tpu_custom_call",
            ', backend_config="{\\"custom_call_config\\": {\\"body\\": \\"TUzv\\"}}"',
        ),
    ],
)
def test_known_custom_calls_do_not_communicate(target: str, attributes: str) -> None:
    assert (rows(call(target, attributes)), others(call(target, attributes))) == ([], [])


def test_a_kernel_states_whether_it_communicates() -> None:
    head = ', backend_config="{\\"custom_call_config\\": {\\"body\\": \\"TUzv\\", '
    sends = call(
        "tpu_custom_call", head + '\\"has_communication\\": true, \\"collective_id\\": 3}}"'
    )
    waits = call("tpu_custom_call", head + '\\"collective_id\\": 3}}"')
    silent = call("tpu_custom_call")

    assert [(row.kind, row.wire_bytes) for row in rows(sends)] == [(Kind.PERMUTE, None)]
    assert others(sends) == []
    expected = ["1 custom call 'tpu_custom_call' may communicate"]
    assert (others(waits), others(silent)) == (expected, expected)


def test_an_unknown_opcode_may_communicate_and_counts_in_loops() -> None:
    (other,) = other_operations(
        parse_hlo(text_of(f"  ROOT x = {ARRAY} teleport(a)"), "m.hlo"), Phase.DECODE
    )

    assert (other.opcode, other.target, other.effect) == ("teleport", None, Effect.UNKNOWN)
    assert (str(other), other.phase) == ("1 operation 'teleport' may communicate", Phase.DECODE)


@pytest.mark.parametrize(
    ("target", "config", "result", "kind", "payload", "wire"),
    [
        (
            "all-gather",
            r"{\"all_gather_dimension\":0,\"replica_groups\":[[0,1,2,3]]}",
            "f32[4096,1024]",
            Kind.ALL_GATHER,
            4,
            3,
        ),
        (
            "all-reduce",
            r"{\"replica_groups\":[[0,1,2,3]],\"channel_id\":1,\"use_global_device_ids\":true}",
            "f32[1024,1024]",
            Kind.ALL_REDUCE,
            1,
            3 / 2,
        ),
        (
            "reduce-scatter",
            r"{\"scatter_dimension\":0,\"replica_groups\":[[0,1,2,3]]}",
            "f32[256,1024]",
            Kind.REDUCE_SCATTER,
            1,
            3 / 4,
        ),
        (
            "all-to-all",
            r"{\"split_dimension\":0,\"concat_dimension\":1,\"replica_groups\":[[0,1,2,3]]}",
            "f32[256,4096]",
            Kind.ALL_TO_ALL,
            1,
            3 / 4,
        ),
        (
            "collective-permute",
            r"{\"source_target_pairs\":[[0,1],[1,2],[2,3]]}",
            "f32[1024,1024]",
            Kind.PERMUTE,
            1,
            1,
        ),
    ],
)
def test_a_custom_call_that_stands_for_a_collective_is_a_row(  # noqa: PLR0917  the columns
    target, config, result, kind, payload, wire
) -> None:
    """Payload and wire bytes are multiples of the operand."""
    text = text_of(
        f'  s = {result} custom-call(a), custom_call_target="{target}-start", '
        f'frontend_attributes={{async_collective_config="{config}"}}\n'
        f'  ROOT d = {result} custom-call(s), custom_call_target="{target}-done"'
    )
    (row,) = rows(text)
    assert (row.kind, row.opcode, row.axis) == (kind, target, "x")
    assert (row.payload_bytes, row.wire_bytes) == (payload * N_BYTES, wire * N_BYTES)
    assert others(text) == []


GROUPS = "replica_groups={{0,1,2,3}}, channel_id=1, use_global_device_ids=true"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (f"ROOT c = {ARRAY} cross-replica-sum(a), {GROUPS}", Kind.ALL_REDUCE),
        (
            f"ROOT c = f32[256,1024] all-reduce-scatter(a), {GROUPS}, dimensions={{0}}",
            Kind.REDUCE_SCATTER,
        ),
        (f"ROOT c = {ARRAY} collective-broadcast(a), {GROUPS}", Kind.BROADCAST),
        (
            (
                f"s = ({ARRAY}, {ARRAY}, u32[], u32[]) collective-permute-start(a), channel_id=1, "
                "source_target_pairs={{0,1}}\n"
                f"  ROOT d = {ARRAY} collective-permute-done(s)"
            ),
            Kind.PERMUTE,
        ),
    ],
    ids=["cross-replica-sum", "all-reduce-scatter", "broadcast", "permute with contexts"],
)
def test_opcodes_of_other_versions_are_rows(body: str, kind: Kind) -> None:
    (row,) = rows(text_of(f"  {body}"))

    assert (row.kind, row.payload_bytes) == (kind, N_BYTES)


ALL, BY_REPLICA, BY_PARTITION = ((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("sizes", "attributes", "groups", "opcode"),
    [
        ((4, 1), "replica_groups={}", ALL, "all-reduce"),
        ((4, 1), "replica_groups={{0,1,2,3}}", ALL, "all-reduce"),
        ((1, 4), "channel_id=1, replica_groups={{0}}", ALL, "all-reduce"),
        ((1, 4), "channel_id=1, replica_groups={}", ALL, "all-reduce"),
        ((2, 2), "replica_groups={}", BY_REPLICA, "all-reduce"),
        ((2, 2), "replica_groups={{0,1}}", BY_REPLICA, "all-reduce"),
        ((2, 2), "channel_id=1, replica_groups={{0,1}}", ALL, "all-reduce"),
        ((2, 2), "channel_id=1, replica_groups={{0},{1}}", BY_PARTITION, "all-reduce"),
        (
            (2, 2),
            "channel_id=1, replica_groups={{0,3},{1,2}}, use_global_device_ids=true",
            ((0, 3), (1, 2)),
            "all-reduce",
        ),
        ((2, 2), "channel_id=1, replica_groups={{0,1}}", BY_PARTITION, "all-to-all"),
        ((2, 2), "channel_id=1, source_target_pairs={{0,1}}", BY_PARTITION, "collective-permute"),
        ((2, 2), "source_target_pairs={{0,1}}", BY_REPLICA, "collective-permute"),
    ],
)
def test_groups_are_those_of_the_mode(sizes, attributes, groups, opcode) -> None:
    names = zip(("replica_count", "num_partitions"), sizes, strict=True)
    header = "".join(f", {name}={size}" for name, size in names if size > 1)
    text = text_of(f"  ROOT c = {ARRAY} {opcode}(a), {attributes}", header=header)
    assert [row.groups for row in rows(text, mesh="a=2,b=2")] == [groups]


@pytest.mark.parametrize(
    ("op_name", "author"),
    [
        (
            r"jit(f)/jit(shmap_body)/all_to_all[axis_name=(\'y\',) split_axis=2 tiled=True]",
            "program",
        ),
        (r"pjit(f)/jit(main)/shard_map[mesh=Mesh(\'x\': 4)]/psum[axes=(\'x\',)]", "program"),
        (r"xmap(g)[axis_sizes={\'i\': 4}]/ppermute[perm=((0, 1), (1, 0))]", "program"),
        *(
            (f"jit(f)/shard_map/{name}", "program")
            for name in ("psum_invariant.7", "all_gather_start", "unreduced_psum", "psend")
        ),
        ("jit(f)/jit(main)/dot_general[dimension_numbers=...]", "partitioner"),
        ("jit(f)/add", "partitioner"),
    ],
)
def test_a_written_collective_is_of_the_program_and_others_of_the_partitioner(
    op_name, author
) -> None:
    body = f'  ROOT c = {ARRAY} all-reduce(a), {GROUPS}, metadata={{op_name="{op_name}"}}'
    assert [row.inserted_by for row in rows(text_of(body))] == [author]


def test_an_axis_has_a_name_in_any_script() -> None:
    assert dict(parse_mesh("données=2,日=4").axes) == {"données": 2, "日": 4}
