"""HLO protos become text that reads like XLA's own: the same instructions, groups and attributes."""

import gzip
import re
from pathlib import Path

import pytest
from tables import stored

from meshscope.readers.hlo.module import HloModule, Instruction
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.profile.hlo_proto import hlo_text
from meshscope.readers.profile.wire import Message, WireError
from meshscope.reports.export.chakra import number, span

GOLDEN = Path(__file__).parents[1] / "golden" / "hlo"
# Loops, asynchronous collectives and fusions, kernels, transfers between slices, dots.
FILES = (
    "2xv6e_across_slices",
    "2xv6e_fsdp4tp2sp_prefill_scan",
    "v5e_dp2tp4_prefill_scan",
    "v5e_fsdp8_prefill_auto_async",
    "v6e_combined",
    "v6e_kernel",
    "v6e_several",
)
IN_ATTRIBUTES = re.compile(
    r", (?:slice_sizes|lhs_contracting_dims|dim_labels|direction|index|kind)="
    r"(?:\{[^}]*\}|[^\s,]+)"
)
TEXTS = stored(Path(__file__).with_suffix(".yaml"))["texts"]
GROUPS = TEXTS["GROUPS"]


def both(text: str) -> tuple[HloModule, HloModule]:
    """The module as XLA writes it, and as we write XLA's proto of it, with an assignment of 8 devices."""
    from jaxlib import xla_client  # noqa: PLC0415  slow to import

    module = xla_client.hlo.hlo_module_from_text(text)
    assignment = span(15, number(1, 1) + number(2, 8))
    ours = hlo_text(Message(span(1, module.as_serialized_hlo_module_proto() + assignment)))
    return parse_hlo(module.to_string(), "xla"), parse_hlo(ours, "ours")


def facts(instruction: Instruction) -> tuple[object, ...]:
    operands = instruction.operand_text if instruction.opcode == "parameter" else ()
    return (
        instruction.name,
        instruction.opcode,
        instruction.shape,
        instruction.operands,
        operands,
        instruction.is_root,
        instruction.called,
        instruction.op_name,
        instruction.estimated_cycles,
        instruction.custom_call_target,
        instruction.channel_id,
        instruction.dimensions,
        instruction.replica_groups,
        instruction.attribute("source_target_pairs"),
        instruction.braced("frontend_attributes"),
        sorted(IN_ATTRIBUTES.findall(instruction.attributes)),
    )


def all_facts(module: HloModule) -> dict[str, list[tuple[object, ...]]]:
    return {c.name: [facts(i) for i in c.instructions] for c in module.computations.values()}


@pytest.mark.parametrize("name", FILES)
def test_text_equals_that_of_xla(name: str) -> None:
    xla, ours = both(gzip.decompress((GOLDEN / f"{name}.jax-0.10.2.txt.gz").read_bytes()).decode())
    assert all_facts(ours) == all_facts(xla)
    assert (ours.name, ours.is_scheduled) == (xla.name, xla.is_scheduled)


def test_groups_in_all_forms_and_scalars_are_kept() -> None:
    xla, ours = both(GROUPS)
    assert all_facts(ours) == all_facts(xla)
    assert ours.n_devices == 8
    entry = ours.entry
    values = {i.name: i.operand_text for i in entry.instructions if i.opcode == "constant"}
    assert values == {"bound": "12", "half": "-0.5"}


def test_devices_come_from_the_device_assignment() -> None:
    assignment = number(1, 2) + number(2, 4)
    parameter = span(1, "p") + span(2, "parameter") + span(3, number(2, 11)) + number(35, 1)
    computation = span(1, "main") + span(2, parameter) + number(5, 1) + number(6, 1)
    module = span(1, "m") + span(3, computation) + number(6, 1) + span(15, assignment)
    read = parse_hlo(hlo_text(Message(span(1, module))), "m")
    assert (read.n_partitions, read.n_replicas) == (4, 2)


def test_a_name_cannot_break_the_text() -> None:
    parameter = span(1, "p) {\n}") + span(2, "parameter") + span(3, number(2, 11)) + number(35, 1)
    metadata = span(7, span(2, 'a"} \n x'))
    computation = span(1, "ma in") + span(2, parameter + metadata) + number(5, 1) + number(6, 1)
    module = span(1, "m\nENTRY") + span(3, computation) + number(6, 1)
    read = parse_hlo(hlo_text(Message(span(1, module))), "m")
    assert [i.name for i in read.entry.instructions] == ["p_____"]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", span(1, b"\x1a\xff"), span(1, span(3, number(2, 1)))],
    ids=["empty", "no-message", "cut-off", "wrong-type"],
)
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        hlo_text(Message(content))


def test_deep_tuples_are_refused() -> None:
    shape = number(2, 13)
    for _ in range(100):
        shape = number(2, 13) + span(4, shape)
    parameter = span(1, "p") + span(2, "parameter") + span(3, shape)
    with pytest.raises(WireError, match="deeper"):
        hlo_text(Message(span(1, span(3, span(2, parameter)))))
