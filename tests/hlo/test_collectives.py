"""Collectives read from compiled programs, and operations that may communicate."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
from goldens import GOLDEN_DIR, GOLDENS, HEAD_DIM, JAX_VERSIONS, Golden
from made_hlo import module_text, rows_in
from tables import stored

from meshscope.analysis.budget import Filter
from meshscope.analysis.totals import Unattributed, unattributed
from meshscope.errors import ParseError
from meshscope.events.collective import Collective, Effect, Groups
from meshscope.events.enums import Kind, Part, Phase, wire_factor
from meshscope.plans.mesh import Mesh, parse_mesh
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.communication import other_operations
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import parse_hlo, read_hlo

FOREIGN = GOLDEN_DIR / "foreign_step.hlo.txt"
N_STEPS = {Phase.PREFILL: 1, Phase.DECODE: 127}


@pytest.fixture(params=JAX_VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


class ComparedRow(NamedTuple):
    """The compared fields of a row: no names, algorithm or source."""

    layer: int | None
    part: Part | None
    kind: Kind
    axis: str | None
    groups: Groups
    dtype: str | None
    shape: tuple[int, ...] | None
    payload_bytes: int | None
    wire_bytes: Fraction | None
    count: int


def _compared(row: Collective) -> ComparedRow:
    return ComparedRow(**{name: getattr(row, name) for name in ComparedRow._fields})


def _without_wire(rows: Iterable[ComparedRow]) -> Counter[ComparedRow]:
    return Counter(row._replace(wire_bytes=None) for row in rows)


def _rows(name: str, version: str) -> list[Collective]:
    golden = GOLDENS[name]
    per_slice = Mesh(axes=golden.axes).n_devices // golden.n_slices

    def crosses_slices(groups: Groups) -> bool | None:
        if golden.n_slices == 1:
            return None
        return any(len({device // per_slice for device in group}) > 1 for group in groups)

    module = read_hlo(GOLDEN_DIR / f"{name}.jax-{version}.txt.gz")
    mesh = ",".join(f"{axis}={size}" for axis, size in golden.axes)
    return rows_in(module, mesh, n_steps_of=N_STEPS, crosses_slices=crosses_slices)


def _written(golden: Golden) -> Iterator[ComparedRow]:
    """The collectives of the shard_map decoder in `programs.py`, derived from its sizes."""
    mesh = Mesh(axes=golden.axes)
    n_data = mesh.size(golden.data) if golden.data else 1
    b, s, d = golden.batch // n_data, golden.steps, golden.hidden
    heads, ffn = golden.heads * HEAD_DIM // golden.n_tp, golden.ffn // golden.n_tp

    def row(layer: int | None, part: Part, kind: Kind, axis: str, *shape: int) -> ComparedRow:
        payload_bytes = 2 * prod(shape)  # bf16
        wire = payload_bytes * wire_factor(kind, mesh.size(axis))
        groups = mesh.groups(axis)
        return ComparedRow(layer, part, kind, axis, groups, "bf16", shape, payload_bytes, wire, 1)

    leave = Kind.REDUCE_SCATTER if golden.sequence else Kind.ALL_REDUCE
    yield row(None, Part.EMBED, leave, "tp", b, s, d)
    for layer in range(golden.layers):
        for part in (Part.ATTN, Part.MLP):
            if golden.sequence:
                yield row(layer, part, Kind.ALL_GATHER, "tp", b, s, d)
            yield row(layer, part, leave, "tp", b, s, d)
        for part, *shape in (
            *((Part.ATTN, d, 3 * heads), (Part.ATTN, heads, d)),
            *((Part.MLP, d, ffn), (Part.MLP, d, ffn), (Part.MLP, ffn, d)),
        ):
            if golden.fsdp:
                yield row(layer, part, Kind.ALL_GATHER, "fsdp", *shape)
    if golden.sequence:
        yield row(None, Part.LM_HEAD, Kind.ALL_GATHER, "tp", b, s, d)
    yield row(None, Part.LM_HEAD, Kind.ALL_GATHER, "tp", b, golden.vocab)


MANUAL = [
    name for name, golden in GOLDENS.items() if golden.program == "decoder" and not golden.is_auto
]


@pytest.mark.parametrize("name", MANUAL)
def test_rows_equal_the_collectives_of_the_program(name: str, version: str) -> None:
    """Kind, shape, groups, bytes and layer, for every chip, loop form and number of slices."""
    rows = _rows(name, version)

    compared, written = list(map(_compared, rows)), list(_written(GOLDENS[name]))
    assert _without_wire(compared) == _without_wire(written)
    if GOLDENS[name].n_slices == 1:  # hierarchical collectives across slices may cost more
        assert Counter(compared) == Counter(written)
    assert unattributed(rows) == Unattributed(count=0, payload_bytes=0, reasons=())
    assert {row.phase for row in rows} == {Phase(GOLDENS[name].phase)}
    assert {row.n_steps for row in rows} == {N_STEPS[Phase(GOLDENS[name].phase)]}


@pytest.mark.parametrize("name", [n.removesuffix("_scan") for n in MANUAL if n.endswith("_scan")])
def test_scanned_and_unrolled_layers_have_the_same_rows(name: str, version: str) -> None:
    """Except names and the unit dim of a slice of stacked weights."""
    keeps_names = GOLDENS[f"{name}_scan"].n_slices == 1

    def kept(row: Collective) -> tuple[object, ...]:
        author = row.inserted_by if keeps_names else None
        return (*_compared(row), row.opcode, row.is_async, row.algorithm, author)

    scanned, unrolled = (_rows(f"{name}_{loop}", version) for loop in ("scan", "unroll"))

    assert Counter(map(kept, scanned)) == Counter(map(kept, unrolled))


@pytest.mark.parametrize("name", MANUAL)
def test_both_compilers_give_the_same_rows(name: str) -> None:
    older, newer = (_rows(name, version) for version in JAX_VERSIONS)

    assert _without_wire(map(_compared, older)) == _without_wire(map(_compared, newer))


def test_explicit_collectives_are_inserted_by_the_program(version: str) -> None:
    rows = _rows("v6e_tp8_prefill_unroll", version)
    facts = {(r.inserted_by, r.is_async, r.source_line.rsplit(":", 1)[0]) for r in rows}
    assert facts == {("program", False, "programs.py")}
    algorithm = "RotatedPincerShortEmitter/StrategyRing, 1 colors, multistep 1"
    assert version != "0.10.2" or rows[0].algorithm == algorithm


def test_tpu7x_runs_every_collective_on_a_sparse_core(version: str) -> None:
    rows = _rows("tpu7x_fsdp2tp4_prefill_scan", version)

    assert {row.is_async for row in rows} == {True}
    assert {str(row.algorithm).split("/")[0] for row in rows} == {"SparseCore"}
    assert all(str(row.hlo_name).endswith(".call-start") for row in rows)


def test_logits_have_the_shape_of_the_program(version: str) -> None:
    """They are gathered along a separate dim; an update-slice and all-reduce costs as much as an all-reduce."""
    row = _rows("v6e_tp8_decode_unroll", version)[-1]
    assert (row.shape, row.hlo_shape) == ((4, 128256), "bf16[8,16032,4]")
    row = _rows("v6e_tp8_decode_auto", version)[-1]
    assert (row.kind, row.opcode, row.part) == (Kind.ALL_GATHER, "all-reduce", Part.LM_HEAD)
    assert (row.shape, row.hlo_shape) == ((1, 128256), "bf16[128256]")
    n_bytes = 2 * 128256
    assert (row.payload_bytes, row.wire_bytes) == (n_bytes, Fraction(2 * 7, 8) * n_bytes)


def test_a_reduce_scatter_fusion_and_a_windowed_einsum_are_recognized(version) -> None:
    """The two directions of a ring send an eighth nine times: before or after the loop, and eight times in it."""
    rows = _rows("v6e_tp8sp_prefill_auto", version)
    scattered = [r for r in rows if r.kind is Kind.REDUCE_SCATTER]
    whole = 8 * 1024 * 4096 * 2  # [8,1024,4096] in bf16
    ring = "SingleInputAllReduceScatterFusion/StrategyRing, 1 colors"
    assert {(r.part, r.opcode, r.payload_bytes, r.wire_bytes, r.algorithm) for r in scattered} == {
        (Part.ATTN, "all-reduce-scatter", whole, whole * 7 // 8, ring),
        (Part.MLP, "collective-permute", whole, whole * 9 // 8, "windowed einsum"),
    }
    assert Kind.PERMUTE not in {row.kind for row in rows}
    assert {r.shape for r in scattered} == {(8, 1024, 4096)}
    assert unattributed(rows) == Unattributed(count=0, payload_bytes=0, reasons=())
    assert {row.inserted_by for row in rows} == {"partitioner"}


def test_a_gather_spread_over_fusions_is_one_row(version: str) -> None:
    """The text has the instruction 27 times; each layer gathers five weights."""
    rows = _rows("v5e_fsdp8_prefill_auto_async", version)
    shapes = [(Part.ATTN, (2048, 3072)), (Part.ATTN, (1024, 2048))]
    shapes += [(Part.MLP, (2048, 8192)), (Part.MLP, (2048, 8192)), (Part.MLP, (8192, 2048))]
    counts = Counter((row.layer, row.part, row.shape) for row in rows)
    assert counts == Counter((layer, *shape) for layer in (0, 1) for shape in shapes)
    assert Counter(row.is_async for row in rows)[True] == 4
    assert unattributed(rows) == Unattributed(count=0, payload_bytes=0, reasons=())


TABLES = stored(Path(__file__).with_name("goldens.yaml"))


def _plain(value: object) -> object:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", TABLES["lists"])
def test_a_program_has_these_rows(name: str, version: str) -> None:
    expected = TABLES["lists"][name]
    rows = zip(_rows(name, version), expected, strict=True)
    assert [{f: _plain(getattr(row, f)) for f in facts} for row, facts in rows] == expected


@pytest.mark.parametrize("name", TABLES["sets"])
def test_rows_of_a_program_differ_in_these_facts(name: str, version: str) -> None:
    names, *expected = TABLES["sets"][name]
    facts = {tuple(getattr(row, name) for name in names) for row in _rows(name, version)}
    assert facts == set(map(tuple, expected))


def test_arrays_of_one_all_reduce_have_its_name_and_unknown_peers_are_counted(version) -> None:
    assert len({row.hlo_name for row in _rows("v6e_combined", version)}) == 1
    open_rows = unattributed(_rows("v6e_kernel", version))
    assert (open_rows.count, open_rows.payload_bytes) == (2, 8 * 1024 * 2)


def _foreign_rows(module: HloModule) -> list[Collective]:
    return rows_in(module, "fsdp=2,tp=2", n_steps_of=N_STEPS, default_phase=Phase.PREFILL)


FSDP, TP, ALL = ((0, 2), (1, 3)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)
# Half of a [64,32] weight in bf16 comes from the partner; the all-reduce over four sends
# 2 x 3/4 of 64 x 64 floats.
FOREIGN_ROWS = [
    ComparedRow(None, None, kind, axis, groups, dtype, shape, n_bytes, Fraction(wire_bytes), count)
    for kind, axis, groups, dtype, shape, n_bytes, wire_bytes, count in (
        (Kind.ALL_GATHER, "fsdp", FSDP, "bf16", (64, 32), 4096, 2048, 3),
        (Kind.ALL_GATHER, "tp", TP, "bf16", (32, 64), 4096, 2048, 3),
        (Kind.ALL_REDUCE, "fsdp+tp", ALL, "f32", (64, 64), 16384, 24576, 1),
    )
]


def test_a_step_without_our_scopes_has_kinds_axes_bytes_and_counts() -> None:
    rows = _foreign_rows(read_hlo(FOREIGN))

    assert list(map(_compared, rows)) == FOREIGN_ROWS
    assert [row.is_async for row in rows] == [False, True, False]
    assert {(row.phase, row.inserted_by) for row in rows} == {(Phase.PREFILL, "partitioner")}
    assert all(str(row.axis_reason).endswith("names no part") for row in rows)


def test_async_gathers_span_the_fusions_that_start_and_end_them() -> None:
    """Against a text search for the computations with AsyncCollectiveStart and -Done."""
    path = GOLDEN_DIR / "v5e_fsdp8_prefill_auto_async.jax-0.10.2.txt.gz"
    chains: dict[str, dict[str, str]] = {"Start": {}, "Done": {}}
    for computation in re.split(r"\n(?=\S)", gzip.decompress(path.read_bytes()).decode()):
        for end, computation_of in chains.items():
            if f'custom_call_target="AsyncCollective{end}"' in computation:
                (chain_id,) = set(re.findall(r'chain_id="(\d+)"', computation))
                computation_of[chain_id] = computation.split()[0].lstrip("%")

    operations = module_collectives(
        read_hlo(path), mesh=Mesh(axes=(("fsdp", 8),)), crosses_slices=lambda _: None
    ).scheduled
    spans = [
        (op.scheduled_op.instruction.called["calls"][0], op.scheduled_op.result.called["calls"][0])
        for op in operations
        if op.is_async and op.scheduled_op.result is not None
    ]

    assert sorted(spans) == sorted((chains["Start"][c], chains["Done"][c]) for c in chains["Start"])
    assert len(spans) == 4


def test_a_plan_of_another_size_is_an_error() -> None:
    module = read_hlo(GOLDEN_DIR / "v6e_tp8_decode_scan.jax-0.10.2.txt.gz")

    with pytest.raises(ParseError, match=r"gz:1: .*compiled for 8 devices.*\(tp=4\) has 4\. Give"):
        rows_in(module, "tp=4")


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
