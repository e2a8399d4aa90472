"""Communication in every form: sends and recvs, custom calls, opcodes of other versions, modes of groups."""

import json

import pytest
from made_hlo import loop_text, module_text, rows_in, while_text

from meshscope.analysis.budget import Filter
from meshscope.errors import ParseError
from meshscope.events.collective import Collective, Effect
from meshscope.events.enums import Kind, Phase
from meshscope.plans.mesh import parse_mesh
from meshscope.readers.hlo.communication import other_operations
from meshscope.readers.hlo.parse import parse_hlo

ARRAY = "f32[1024,1024]{1,0}"
N_BYTES = 1024 * 1024 * 4
RING = ((0, 1), (1, 2), (2, 3))


def text_of(body: str, *, header: str = ", num_partitions=4", computations: str = "") -> str:
    parameters = f"  %a = {ARRAY} parameter(0)\n  %tok = token[] after-all()\n"
    return module_text(parameters + body, computations, header=header)


def rows(text: str, mesh: str = "x=4") -> list[Collective]:
    return rows_in(text, mesh)


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
    sent = pair("channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}").replace("send(a", "send(x")
    lines = f"  tok = token[] after-all()\n{sent}\n"
    loop = loop_text("l", 7, lines, "o", ARRAY)
    body = "  %zero = s32[] constant(0)\n" + while_text("l", "a", array=ARRAY)
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
    "all-reduce": ("f32[4]", "to_apply=%add", 2 * 16 * 3 / 4),
    "all-gather": ("f32[16]", "dimensions={0}", 64 * 3 / 4),
    "reduce-scatter": ("f32[1]", "dimensions={0}, to_apply=%add", 16 * 3 / 4),
    "all-to-all": ("f32[4]", "dimensions={0}", 16 * 3 / 4),
    "collective-broadcast": ("f32[4]", "", 16),
}


@pytest.mark.parametrize("opcode", COLLECTIVES)
@pytest.mark.parametrize("groups", ["", ", replica_groups={}"], ids=["absent", "empty"])
def test_a_collective_without_groups_has_all_devices_in_one(opcode: str, groups: str) -> None:
    shape, attributes, wire_bytes = COLLECTIVES[opcode]
    body = f"""\
  b = f32[4] constant({{1,2,3,4}})
  ROOT c = {shape} {opcode}(b), channel_id=1{groups}, use_global_device_ids=true, {attributes}"""

    (row,) = rows(text_of(body))

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


LOCAL = {"custom_call_config": {"body": "TUzv"}}


@pytest.mark.parametrize(
    ("target", "config"),
    [
        *(("Sharding", None), ("SPMDFullToShardShape", None), ("TopK", None)),
        *(("xla.sdy.FuncResultSharding", None), ("__cublas$gemm", None)),
        *(("__cudnn$fmhaSoftmax", None), ("lapack_sgetrf_ffi", None)),
        ("tpu_custom_call", json.dumps(LOCAL)),
        ("tpu_custom_call", json.dumps(json.dumps(LOCAL))),  # as text
    ],
)
def test_known_custom_calls_do_not_communicate(target: str, config: str | None) -> None:
    text = call(target, "" if config is None else f", backend_config={config}")
    assert (rows(text), others(text)) == ([], [])


def test_a_kernel_states_whether_it_communicates() -> None:
    def kernel(**stated: object) -> str:
        config = {"custom_call_config": {"body": "TUzv", **stated}}
        return call("tpu_custom_call", f", backend_config={json.dumps(json.dumps(config))}")

    sends = kernel(has_communication=True, collective_id=3)
    assert [(row.kind, row.wire_bytes) for row in rows(sends)] == [(Kind.PERMUTE, None)]
    assert others(sends) == []
    for text in (kernel(collective_id=3), call("tpu_custom_call")):
        assert others(text) == ["1 custom call 'tpu_custom_call' may communicate"]


def test_an_unknown_opcode_may_communicate_and_counts_in_loops() -> None:
    (other,) = other_operations(
        parse_hlo(text_of(f"  ROOT x = {ARRAY} teleport(a)"), "m.hlo"), Phase.DECODE
    )

    assert (other.opcode, other.target, other.effect) == ("teleport", None, Effect.UNKNOWN)
    assert (str(other), other.phase) == ("1 operation 'teleport' may communicate", Phase.DECODE)


STANDS_FOR = {
    "all-gather": ("all_gather_dimension", "f32[4096,1024]", Kind.ALL_GATHER, 4, 3),
    "all-reduce": ("channel_id", "f32[1024,1024]", Kind.ALL_REDUCE, 1, 3 / 2),
    "reduce-scatter": ("scatter_dimension", "f32[256,1024]", Kind.REDUCE_SCATTER, 1, 3 / 4),
    "all-to-all": ("split_dimension", "f32[256,4096]", Kind.ALL_TO_ALL, 1, 3 / 4),
    "collective-permute": ("source_target_pairs", "f32[1024,1024]", Kind.PERMUTE, 1, 1),
}


@pytest.mark.parametrize("target", STANDS_FOR)
def test_a_custom_call_that_stands_for_a_collective_is_a_row(target: str) -> None:
    """Payload and wire bytes are multiples of the operand."""
    attribute, result, kind, payload, wire = STANDS_FOR[target]
    config: dict[str, object] = {"replica_groups": [[0, 1, 2, 3]], attribute: 0}
    if attribute == "source_target_pairs":
        config = {attribute: [[0, 1], [1, 2], [2, 3]]}
    text = text_of(
        f'  s = {result} custom-call(a), custom_call_target="{target}-start", '
        f"frontend_attributes={{async_collective_config={json.dumps(json.dumps(config))}}}\n"
        f'  ROOT d = {result} custom-call(s), custom_call_target="{target}-done"'
    )
    (row,) = rows(text)
    assert (row.kind, row.opcode, row.axis) == (kind, target, "x")
    assert (row.payload_bytes, row.wire_bytes) == (payload * N_BYTES, wire * N_BYTES)
    assert others(text) == []


@pytest.mark.parametrize("number", [1, "1"], ids=["number", "text"])
def test_numbers_of_a_custom_call_that_stands_for_a_collective_may_be_texts(number: object) -> None:
    """Protobuf writes integers of 64 bits as texts."""
    config = {
        "replica_groups": [[0, 1, 2, 3]],
        "channel_id": number,
        "all_gather_dimension": number,
    }
    text = text_of(
        '  ROOT s = f32[1024,4096] custom-call(a), custom_call_target="all-gather-start", '
        f"frontend_attributes={{async_collective_config={json.dumps(json.dumps(config))}}}"
    )
    (gather,) = (i for i in parse_hlo(text, "m.hlo").instructions if i.opcode == "all-gather-start")
    assert (gather.channel_id, gather.dimensions) == (1, (1,))


GROUPS = "replica_groups={{0,1,2,3}}, channel_id=1, use_global_device_ids=true"


STARTED = f"""s = ({ARRAY}, {ARRAY}, u32[], u32[]) collective-permute-start(a), channel_id=1, \
source_target_pairs={{{{0,1}}}}
  ROOT d = {ARRAY} collective-permute-done(s)"""


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (f"ROOT c = {ARRAY} cross-replica-sum(a), {GROUPS}", Kind.ALL_REDUCE),
        (f"ROOT c = f32[256,1024] all-reduce-scatter(a), {GROUPS}, dimensions={{0}}", Kind.REDUCE_SCATTER),
        (f"ROOT c = {ARRAY} collective-broadcast(a), {GROUPS}", Kind.BROADCAST),
        (STARTED, Kind.PERMUTE),
    ],
    ids=["cross-replica-sum", "all-reduce-scatter", "broadcast", "permute with contexts"],
)  # fmt: skip
def test_opcodes_of_other_versions_are_rows(body: str, kind: Kind) -> None:
    (row,) = rows(text_of(f"  {body}"))
    assert (row.kind, row.payload_bytes) == (kind, N_BYTES)


ALL, BY_REPLICA, BY_PARTITION = ((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0, 1), (2, 3))


REDUCE, EXCHANGE, PERMUTE = "all-reduce", "all-to-all", "collective-permute"
CROSSED, GLOBAL = ((0, 3), (1, 2)), "replica_groups={{0,3},{1,2}}, use_global_device_ids=true"


@pytest.mark.parametrize(
    ("sizes", "attributes", "groups", "opcode"),
    [
        ((4, 1), "replica_groups={}", ALL, REDUCE),
        ((4, 1), "replica_groups={{0,1,2,3}}", ALL, REDUCE),
        ((1, 4), "channel_id=1, replica_groups={{0}}", ALL, REDUCE),
        ((1, 4), "channel_id=1, replica_groups={}", ALL, REDUCE),
        ((2, 2), "replica_groups={}", BY_REPLICA, REDUCE),
        ((2, 2), "replica_groups={{0,1}}", BY_REPLICA, REDUCE),
        ((2, 2), "channel_id=1, replica_groups={{0,1}}", ALL, REDUCE),
        ((2, 2), "channel_id=1, replica_groups={{0},{1}}", BY_PARTITION, REDUCE),
        ((2, 2), f"channel_id=1, {GLOBAL}", CROSSED, REDUCE),
        ((2, 2), "channel_id=1, replica_groups={{0,1}}", BY_PARTITION, EXCHANGE),
        ((2, 2), "channel_id=1, source_target_pairs={{0,1}}", BY_PARTITION, PERMUTE),
        ((2, 2), "source_target_pairs={{0,1}}", BY_REPLICA, PERMUTE),
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
        (r"jit(f)/jit(shmap_body)/all_to_all[axis_name=(\'y\',) split_axis=2 tiled=True]", "program"),
        (r"pjit(f)/jit(main)/shard_map[mesh=Mesh(\'x\': 4)]/psum[axes=(\'x\',)]", "program"),
        (r"xmap(g)[axis_sizes={\'i\': 4}]/ppermute[perm=((0, 1), (1, 0))]", "program"),
        *(
            (f"jit(f)/shard_map/{name}", "program")
            for name in ("psum_invariant.7", "all_gather_start", "unreduced_psum", "psend")
        ),
        ("jit(f)/jit(main)/dot_general[dimension_numbers=...]", "partitioner"),
        ("jit(f)/add", "partitioner"),
    ],
)  # fmt: skip
def test_a_written_collective_is_of_the_program_and_others_of_the_partitioner(
    op_name, author
) -> None:
    body = f'  ROOT c = {ARRAY} all-reduce(a), {GROUPS}, metadata={{op_name="{op_name}"}}'
    assert [row.inserted_by for row in rows(text_of(body))] == [author]


def test_an_axis_has_a_name_in_any_script() -> None:
    assert dict(parse_mesh("données=2,日=4").axes) == {"données": 2, "日": 4}
