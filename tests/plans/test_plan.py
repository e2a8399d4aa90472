"""Parsing of plans, refusal of invalid ones, and the parallelism that causes a collective."""

import json
import random
from collections import defaultdict
from dataclasses import replace
from itertools import combinations, permutations, product

import polars as pl
import pytest
from tables import table

import meshscope
from meshscope.api.compare import compare
from meshscope.errors import PlanError
from meshscope.events.collective import Groups
from meshscope.events.enums import Part, Phase
from meshscope.model.config import read_model
from meshscope.plans.checks import check_batch, check_model
from meshscope.plans.mesh import Mesh, parse_mesh
from meshscope.plans.plan import ALIASES, AXES, Plan, parallelism_of, parse_plan
from meshscope.plans.workload import Workload
from meshscope.store.write import sha256

LLAMA = read_model("Llama-3.1-8B")  # 32 layers, 32 heads, 8 KV heads, hidden 4096, ffn 14336


@table
def test_plans_are_parsed(text: str, plan: Plan) -> None:
    assert parse_plan(text) == plan


@pytest.mark.parametrize("text", ["tp=1", "dp=2,tp=4,sp", "fsdp=8", "pp=2,dp=2,cp=2,tp=2,ep=4"])
def test_plans_are_printed_as_typed(text: str) -> None:
    assert str(parse_plan(text)) == text


def test_every_alias_names_an_axis() -> None:
    assert set(ALIASES.values()) <= {*AXES, "sp"}


@table
def test_an_invalid_plan_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(PlanError, match=remedy):
        parse_plan(text)


@table
def test_the_mesh_has_the_axes_in_order_without_those_of_size_one(text, axes) -> None:
    assert [list(axis) for axis in parse_plan(text).mesh.axes] == axes


@table
def test_minus_one_fills_the_slice(text: str, n_devices: int, filled: str) -> None:
    plan = parse_plan(text).filled(n_devices)
    assert (str(plan), plan.n_devices) == (filled, n_devices)


@table
def test_a_plan_that_does_not_cover_the_slice_is_refused(text, n_devices, remedy) -> None:
    with pytest.raises(PlanError, match=remedy):
        parse_plan(text).filled(n_devices)


@table
def test_an_indivisible_workload_is_refused(text, batch, prompt, remedy) -> None:
    with pytest.raises(PlanError, match=remedy):
        check_batch(parse_plan(text), Workload(batch=batch, prompt=prompt))


@table
def test_an_indivisible_model_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(PlanError, match=remedy):
        check_model(parse_plan(text), LLAMA)


def test_tp_must_divide_the_output_groups() -> None:
    """The output projection sums the heads of a group, so tp cannot split a group."""
    with pytest.raises(PlanError, match=r"tp=16 does not divide o_groups=8. Use a tp"):
        check_model(Plan(tp=16), read_model("DeepSeek-V4"))


def test_tp_must_divide_ffn_and_match_kv_heads() -> None:
    odd = replace(LLAMA, ffn=100)
    with pytest.raises(PlanError, match="tp=8 does not divide ffn=100"):
        check_model(Plan(tp=8), odd)
    attention = replace(LLAMA.attention, n_heads=24, n_kv_heads=6)
    with pytest.raises(PlanError, match="tp=4 neither divides nor is a multiple of n_kv_heads=6"):
        check_model(Plan(tp=4), replace(LLAMA, attention=attention))


@pytest.mark.parametrize("text", ["tp=32", "tp=8,sp", "fsdp=16,tp=8", "pp=32"])
def test_kv_heads_may_be_fewer_than_tp_and_stages_as_many_as_layers(text: str) -> None:
    check_model(parse_plan(text), LLAMA)


DENSE, MIXTURE = "Qwen/Qwen3-4B", "deepseek-ai/DeepSeek-V2-Lite"


def _predicted(model: str, plan: str) -> meshscope.Run:
    return meshscope.predict(model, topology="v6e-8", plan=plan, batch=8, prompt=256, layers=4)


@table
def test_each_predicted_row_has_the_parallelism_that_causes_it(model, plan, expected):
    """`expected` has the parts of a prefill."""
    parallelisms: dict[str, set[str]] = defaultdict(set)
    for row in _predicted(model, plan).record.rows:
        if row.phase is Phase.PREFILL:
            parallelisms[row.parallelism].add(str(row.part))
    assert parallelisms == {name: set(parts.split()) for name, parts in expected.items()}


def test_the_parallelism_of_an_unknown_axis_is_unknown():
    row = next(r for r in _predicted(DENSE, "tp=8").record.rows if r.part is Part.ATTN)
    assert parallelism_of(replace(row, axis=None), parse_plan("tp=8")) is None
    for axis in ("x", "ring", "tp+x", "x+expert"):
        assert parallelism_of(replace(row, axis=axis), None) is None


NAMED = {
    **{axis: axis for axis in ("pp", "dp", "fsdp", "cp", "tp", "ep", "sp")},
    "expert": "ep", "sequence": "sp", "seq": "sp", "context": "cp", "data": "dp", "model": "tp",
    "tensor": "tp", "stage": "pp",
}  # fmt: skip


def test_each_name_of_an_axis_of_a_users_mesh_alone_and_in_pairs_has_its_parallelism():
    """Traffic over axes called ep, sp, expert, sequence or context had none."""
    row = next(r for r in _predicted(DENSE, "tp=8").record.rows if r.part is Part.ATTN)
    alone = {axis: parallelism_of(replace(row, axis=axis, part=None), None) for axis in NAMED}
    assert alone == NAMED
    for one, other in permutations(NAMED, 2):
        parts = dict.fromkeys((NAMED[one], NAMED[other]))
        expected = "cp" if {one, other} == {"cp", "tp"} else "+".join(parts)
        assert parallelism_of(replace(row, axis=f"{one}+{other}", part=None), None) == expected


def test_a_stored_run_can_be_grouped_by_parallelism(tmp_path):
    folder = tmp_path / "run"
    run = meshscope.predict(
        MIXTURE, topology="v6e-8", plan="dp=2,tp=4,ep=8", layers=2, batch=8, out=folder
    )
    query = "select parallelism, sum(wire_bytes * count) from collectives group by parallelism"
    sums = dict(meshscope.open(folder).sql(query).rows())
    assert sums == {
        name: pytest.approx(
            sum(row.wire_bytes * row.count for row in run.record.rows if row.parallelism == name)
        )
        for name in ("ep", "tp")
    }


def test_a_run_of_an_older_version_opens_with_its_parallelism(tmp_path):
    folder = tmp_path / "run"
    written = meshscope.predict(DENSE, topology="v6e-8", plan="tp=8,sp", layers=2, out=folder)
    table = pl.read_parquet(folder / "events.parquet")
    table.drop("parallelism").write_parquet(folder / "events.parquet")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["digest"]
    manifest["files"]["events.parquet"] = sha256(folder / "events.parquet")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert meshscope.open(folder)[0].record.rows == written.record.rows


def test_a_comparison_of_two_plans_names_the_axes_of_each():
    """The devices of fsdp=8 are those of pp=2,tp=4, and its traffic is still of fsdp."""
    pipeline, gathered = (_predicted(DENSE, plan) for plan in ("pp=2,tp=4", "fsdp=8"))
    comparison = compare(pipeline, gathered)
    axes = {m.right.axis for m in comparison.comparison.matches if m.right is not None}
    assert axes == {"fsdp"}


MESHES = [
    Mesh(axes=(("tp", 1),)),
    Mesh(axes=(("tp", 8),)),
    Mesh(axes=(("dp", 2), ("tp", 4))),
    Mesh(axes=(("fsdp", 4), ("tp", 4))),
    Mesh(axes=(("pp", 2), ("dp", 3), ("cp", 2), ("tp", 2))),
]
LABELS = [" ".join(f"{name}={size}" for name, size in mesh.axes) for mesh in MESHES]
EVERY_MESH = pytest.mark.parametrize("mesh", MESHES, ids=LABELS)


def _coordinates(mesh: Mesh) -> list[tuple[int, ...]]:
    """The coordinates of devices 0, 1, 2, ...; the last axis varies fastest."""
    return list(product(*(range(size) for size in mesh.sizes)))


def _groups_by_brute_force(mesh: Mesh, names: tuple[str, ...]) -> Groups:
    """Groups of devices that agree on all other axes, in device order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, coordinates in enumerate(_coordinates(mesh)):
        others = (c for name, c in zip(mesh.names, coordinates, strict=True) if name not in names)
        groups.setdefault(tuple(others), []).append(device)
    return tuple(map(tuple, groups.values()))


def _choices(mesh: Mesh) -> list[tuple[str, ...]]:
    return [c for n in range(1, len(mesh.names) + 1) for c in combinations(mesh.names, n)]


@EVERY_MESH
def test_groups_are_the_devices_that_agree_on_every_other_axis(mesh: Mesh) -> None:
    for names in _choices(mesh):
        assert mesh.groups(*names) == _groups_by_brute_force(mesh, names)


@EVERY_MESH
def test_groups_of_a_missing_axis_have_one_device(mesh: Mesh) -> None:
    assert mesh.size("ep") == 1
    assert mesh.groups("ep") == tuple((device,) for device in range(mesh.n_devices))


@EVERY_MESH
def test_the_axis_is_found_from_its_groups_in_any_order(mesh: Mesh) -> None:
    order = random.Random(0)
    for names in _choices(mesh):
        groups = [order.sample(group, len(group)) for group in mesh.groups(*names)]
        order.shuffle(groups)
        expected = "+".join(n for n in names if mesh.size(n) > 1) or None
        assert mesh.axis_of_groups(tuple(map(tuple, groups))) == expected


@table
def test_groups_of_no_axis(groups: Groups) -> None:
    assert Mesh(axes=(("dp", 2), ("tp", 2))).axis_of_groups(groups) is None


@table
def test_the_axis_of_pairs_is_the_one_they_cross(pairs: Groups, axis: str | None) -> None:
    assert Mesh(axes=(("pp", 2), ("tp", 4))).axis_of_pairs(pairs) == axis


def test_groups_of_a_stage_are_those_of_its_devices() -> None:
    """A pair belongs to the stage of its sender."""
    mesh = Mesh(axes=(("pp", 2), ("dp", 2), ("tp", 2)))
    assert mesh.groups_of_stage(mesh.groups("tp"), 1) == ((4, 5), (6, 7))
    assert mesh.groups_of_stage(mesh.groups("dp", "tp"), 0) == ((0, 1, 2, 3),)
    pairs, mesh = ((0, 2), (1, 3), (2, 4), (3, 5)), Mesh(axes=(("pp", 3), ("tp", 2)))
    assert [mesh.groups_of_stage(pairs, stage) for stage in range(3)] == [pairs[:2], pairs[2:], ()]


def test_parts_of_the_groups_of_an_axis_have_the_axis_around_them() -> None:
    one = Mesh(axes=(("x", 8),))
    two = Mesh(axes=(("a", 2), ("b", 4)))
    placed = Mesh(axes=(("a", 2), ("b", 4)), order=(0, 2, 4, 6, 1, 3, 5, 7))
    assert one.axis_around_groups(((0, 2, 4, 6), (1, 3, 5, 7))) == "x"
    assert two.axis_around_groups(((0, 1), (2, 3), (4, 5), (6, 7))) == "b"
    assert placed.axis_around_groups(((0, 2), (4, 6), (1, 3), (5, 7))) == "b"
    assert two.axis_around_groups(((0, 5), (1, 4), (2, 7), (3, 6))) is None  # of both axes
    assert two.axis_around_groups(((0,), (1,))) is None


def test_no_axis_has_the_name_that_tables_give_to_an_unknown_one() -> None:
    with pytest.raises(PlanError, match=r"cannot be named 'unknown'.* Give it another name"):
        parse_mesh("unknown=2,model=4")
