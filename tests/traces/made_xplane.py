"""XPlanes of programs of which we have the HLO: hosts that ran them, with HLO inside or not."""

import gzip
from functools import cache
from pathlib import Path

import made_profiles as made

from meshscope.readers.hlo.executions import call_sites
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.reports.export.chakra import number, span

TESTS = Path(__file__).parents[1]
PROGRAM_ID = 12345678901234567890
US = 10**6  # ps


@cache
def golden_text(name: str) -> str:
    """Optimized HLO text as XLA writes it from its proto."""
    path = TESTS / "golden" / "hlo" / f"{name}.jax-0.10.2.txt.gz"
    return gzip.decompress(path.read_bytes()).decode()


@cache
def hlo_proto(text: str, n_devices: int) -> bytes:
    """The HloProto of a module with the assignment of its devices, as profiles contain it."""
    from jaxlib import xla_client  # noqa: PLC0415  slow to import

    module = xla_client.hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return span(1, module + span(15, number(1, 1) + number(2, n_devices)))


def metadata_plane(protos: dict[str, bytes]) -> object:
    """The plane that holds the programs; its kinds of events have no events."""
    line = made.Line("", [made.Event(name, 0, 0) for name in protos])
    return made.Plane(
        name="/host:metadata",
        lines=[line],
        kind_stats={name: {"Hlo Proto": content} for name, content in protos.items()},
    )


def executed(module: HloModule) -> list[str]:
    """The event names of one run: a line of HLO for each execution of a collective."""
    sites = call_sites(module, lambda i: i.opcode.startswith(KINDS) or "-permute" in i.opcode)
    lines: list[str] = []
    for site in sites:
        instruction = site.instruction
        line = (
            f"%{instruction.name} = {instruction.shape_text} {instruction.opcode}"
            f"({instruction.operand_text}){instruction.attributes.partition(', metadata=')[0]}"
        )
        lines += [line] * site.count
    return lines


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def chip(ordinal: int, module: HloModule, *, n_runs: int, lost: int = 0) -> object:
    """A chip that ran the program; each collective takes 10 us, and a fusion before it 20 us."""
    ops: list[object] = []
    runs: list[object] = []
    at = 0
    names = executed(module)
    for run in range(n_runs):
        first = at
        for name in names[lost if run == n_runs - 1 else 0 :]:
            ops.append(made.Event("%fusion.1 = f32[4] fusion(f32[4] %x)", at, 20 * US))
            ops.append(made.Event(name, at + 20 * US, 10 * US))
            at += 30 * US
        label = f"{module.name}({PROGRAM_ID})"
        runs.append(made.Event(label, first, max(at - first, 1), {"run_id": run + 1}))
    kinds = {name: {"program_id": made.Unsigned(PROGRAM_ID)} for name in {e.name for e in ops}}
    return made.Plane(
        name=f"/device:TPU:{ordinal}",
        lines=[made.Line("XLA Modules", runs), made.Line("XLA Ops", ops)],
        stats={"device_type_string": "TPU v6 Lite"},
        kind_stats=kinds,
    )


def hosts(
    folder: Path, name: str, *, n_runs: int = 2, with_hlo: bool = True, lost: int = 0
) -> list[Path]:
    """Two hosts of four chips that ran a program; both count their chips from 0."""
    module = parse_hlo(golden_text(name), name)
    label = f"{module.name}({PROGRAM_ID})"
    inside = [metadata_plane({label: hlo_proto(golden_text(name), 8)})] if with_hlo else []
    paths = []
    for host in range(2):
        chips = [
            chip(n, module, n_runs=n_runs, lost=lost if (host, n) == (1, 3) else 0)
            for n in range(4)
        ]
        paths.append(made.write(folder / f"host{host}.xplane.pb", *inside, *chips))
    return paths
