"""Markdown tables of experts.md, torchxla.md and figures.md in docs/evidence, printed from their CSV files by cog."""

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from meshscope.units import format_bytes, format_seconds

DOCS = Path(__file__).parent
LARGE_BYTES = 1_000_000  # smaller collectives are counted, not listed

Row = Mapping[str, str]


def read(name: str) -> list[Row]:
    """The rows of a CSV file under docs/."""
    with (DOCS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def paper_requests() -> None:
    """Prints the times that the paper prints for two nodes of H100s beside the predicted ones."""
    lines: list[list[str]] = []
    for number in (8, 9, 10):
        rows = [
            row for row in read(f"evidence/figures/figure-{number}.csv") if "H100" in row["series"]
        ]
        value_s = {(row["plan"], row["panel"], row["basis"]): float(row["value"]) for row in rows}
        for row in rows:
            if not row["basis"].startswith("the paper"):
                continue
            plan, metric, printed_s = row["plan"], row["panel"], float(row["value"])
            (predicted_s,) = [
                v for k, v in value_s.items() if k[:2] == (plan, metric) and k[2] != row["basis"]
            ]
            times = (format_seconds(printed_s), format_seconds(predicted_s))
            half = "fitted" if number < 10 else "judged"
            ratio = f"{predicted_s / printed_s:.2f}"
            lines.append([str(number), row["model"], plan, metric, *times, ratio, half])
    _print(["figure", "model", "plan", "time", "printed", "predicted", "ratio", "half"], lines)


def bytes_by_chips(column: str) -> None:
    """Prints one row per model and variant, one column per number of chips."""
    rows = _by_model(row for row in read("evidence/moe/cases.csv") if row["study"] == "moe")
    sizes = sorted({int(row["n_devices"]) for row in rows})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        cell = "refused" if row["refused"] else format_bytes(int(row[column]))
        lines.setdefault((row["model"], row["way"]), {})[int(row["n_devices"])] = cell
    _print(
        ["model", "variant", *(f"{size} chips" for size in sizes)],
        [
            [model, way, *(cells.get(size, "") for size in sizes)]
            for (model, way), cells in lines.items()
        ],
    )


def what_moves(n_devices: int) -> None:
    """Prints the large collectives of each variant on one slice, and counts the smaller ones."""
    cases = [
        row
        for row in read("evidence/moe/cases.csv")
        if row["study"] == "moe" and int(row["n_devices"]) == n_devices and not row["refused"]
    ]
    lines: list[list[str]] = []
    for case in _by_model(cases):
        collectives = [row for row in read("evidence/moe/collectives.csv") if _is_of(row, case)]
        large = [row for row in collectives if int(row["payload_bytes"] or 0) >= LARGE_BYTES]
        n_small = sum(int(row["count"]) for row in collectives) - sum(
            int(r["count"]) for r in large
        )
        labels = [case["model"], case["way"]]
        for row in large:
            lines.append([*labels, row["part"], _operation(row), *_sizes(row)])
            labels = ["", ""]
        lines.append([*labels, "", f"{n_small} smaller than 1 MB", "", "", ""])
    _print(["model", "variant", "part", "operation", "array", "payload", "wire"], lines)


def _by_model(rows: Iterable[Row]) -> list[Row]:
    """The rows grouped by model, variants in the order of their first row."""
    rows = list(rows)
    models, ways = ([row[name] for row in rows] for name in ("model", "way"))
    return sorted(rows, key=lambda row: (models.index(row["model"]), ways.index(row["way"])))


def _operation(row: Row) -> str:
    carried = row["algorithm"] if row["algorithm"] == "windowed einsum" else row["opcode"]
    as_what = "" if carried.replace("-", "_") == row["kind"] else f" as {carried}"
    sync = "asynchronous" if row["is_async"] == "True" else "synchronous"
    return f"{row['count']} {row['kind']}{as_what}, {sync}"


def _sizes(row: Row) -> list[str]:
    sizes = (format_bytes(int(row[name])) for name in ("payload_bytes", "wire_bytes"))
    return [f"`{row['array']}`" if row["array"] else "", *sizes]


def what_is_hidden(study: str, ways: Sequence[str] = ()) -> None:
    """Prints the cycles of each program, and those covered by asynchronous collectives."""
    lines: list[list[str]] = []
    for case in sorted(read("evidence/moe/cases.csv"), key=lambda row: int(row["n_devices"])):
        if case["study"] != study or case["refused"] or (ways and case["way"] not in ways):
            continue
        windows = [row for row in read("evidence/moe/windows.csv") if _is_of(row, case)]
        counts = [
            sum(int(w["count"]) for w in windows if w["is_async"] == str(is_async))
            for is_async in (False, True)
        ]
        lines.append(
            [case["model"], case["n_devices"], case["way"], *map(str, counts)]
            + [_cycles(case[name]) for name in ("estimated_cycles", "covered_cycles")]
            + [case["unestimated"]]
        )
    head = ["model", "chips", "variant", "synchronous", "asynchronous"]
    _print([*head, "cycles", "covered", "without an estimate"], lines)


def windows_of(cases: Iterable[tuple[str, str, str]]) -> None:
    """Prints the estimated work between start and done of each exchange of rows."""
    lines: list[list[str]] = []
    for study, model, way in cases:
        for row in read("evidence/moe/windows.csv"):
            key = (row["study"], row["model"], row["way"])
            if key == (study, model, way) and row["slice"] == "v5e:2x4" and _is_exchange(row):
                lines.append([way, row["part"], row["opcode"], _window(row), row["n_unestimated"]])
    head = ["variant", "part", "operation", "estimated cycles between start and done"]
    _print([*head, "instructions without an estimate"], lines)


def _is_exchange(row: Row) -> bool:
    return row["opcode"] in {"all-to-all", "ragged-all-to-all"}


def _window(row: Row) -> str:
    return _cycles(row["hidden_cycles"]) if row["is_async"] == "True" else "synchronous"


def rings() -> None:
    """Prints the variants of a reduce-scattered matmul."""
    _print(
        ["variant", "cycles", "covered", "transfers that overlap", "that do not"],
        [
            [
                row["way"],
                _cycles(row["estimated_cycles"]),
                _cycles(row["covered_cycles"]),
                row["n_hiding"],
                str(int(row["n_asynchronous"]) + int(row["n_synchronous"]) - int(row["n_hiding"])),
            ]
            for row in read("evidence/moe/rings.csv")
        ],
    )


def fsdp() -> None:
    """Prints memory and gathered bytes of each case beside the formulas."""
    lines: list[list[str]] = []
    for case in read("evidence/fsdp/cases.csv"):
        rows = [row for row in read("evidence/fsdp/collectives.csv") if _is_of(row, case)]
        n, n_layers = int(case["n_devices"]), int(case["n_layers"])
        in_layers = [row for row in rows if row["part"] in {"attn", "mlp"}]
        layer, wire = (
            Fraction(sum(_sent(row, column) for row in in_layers), n_layers)
            for column in ("payload_bytes", "wire_bytes")
        )
        lines.append(
            [
                *(case[name] for name in ("model", "slice", "way")),
                *map(format_bytes, (int(case["weights_bytes"]), layer, wire)),
                format_bytes(layer * Fraction(n - 1, n)),
                format_bytes(int(case["temp_bytes"])),
                f"{float(int(case['temp_bytes']) / layer):.2f}",
            ]
        )
    head = ["model", "slice", "layers", "weights per device", "gathered layer", "sent"]
    _print([*head, "(N-1)/N of a layer", "temporary memory", "in gathered layers"], lines)


def torchxla() -> None:
    """Prints what TorchXLA's and JAX's programs send, one line per phase."""
    lines: list[list[str]] = []
    previous: tuple[str, ...] = ()
    for row in read("evidence/torchxla/compared.csv"):
        is_auto = row["partitioner"] == "auto"
        pair = (row["model"].rsplit("/", 1)[-1], row["plan"] + (", auto" if is_auto else ""))
        lines.append(
            [
                *(("", "") if pair == previous else pair),
                row["phase"],
                *(row[f"{side}_count"] for side in ("jax", "torchxla")),
                ", ".join(map(_verdict, row["of_jax"].split())),
                *(format_bytes(int(row[f"{side}_wire_bytes"])) for side in ("jax", "torchxla")),
            ]
        )
        previous = pair
    head = ["model", "plan", "phase", "collectives, JAX", "TorchXLA", "TorchXLA against JAX"]
    _print([*head, "sent, JAX", "TorchXLA"], lines)


def _verdict(word: str) -> str:
    """`3 with more bytes` for `3xcostlier`."""
    count, _, name = word.partition("x")
    labels = {"costlier": "with more bytes", "cheaper": "with fewer bytes"}
    return f"{count} {labels.get(name, name)}"


def _sent(row: Row, column: str) -> int:
    return int(row["count"]) * int(row[column] or 0)


def _is_of(row: Row, case: Row) -> bool:
    return all(row[name] == case[name] for name in ("study", "model", "slice", "way"))


def _cycles(text: str) -> str:
    return f"{int(text) / 1e6:.2f} M"


def _print(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """A Markdown table."""
    for cells in (head, ["---"] * len(head), *lines):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
