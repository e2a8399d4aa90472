"""The runs of a sweep side by side, one row per run: for summary.parquet, --json and as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from meshscope.events.enums import REQUEST_PHASES
from meshscope.events.schema import schema_of
from meshscope.reports.document import run_document
from meshscope.reports.model import UNKNOWN_LABEL, ViewTable, known, plain, table
from meshscope.serialize import picked
from meshscope.store.run import Manifest, RunRecord

Row = dict[str, Any]

_SHOWN = ("model", "topology", "plan")  # columns of every table
_FIGURES = ("count", "payload_bytes", "wire_bytes")
SUMMARY_SCHEMA = schema_of("summary")


def summary_row(name: str, run: RunRecord) -> Row:
    """The figures of `show --json` as one row of SUMMARY_SCHEMA."""
    document, served = run_document(run, has_suggestions=False), run.manifest.served
    totals: Mapping[str, Any] = {
        phase: {**_whole(total), "request": _whole(total["request"])}
        for phase, total in document["totals"].items()
    }
    requests = [figures["request"] for figures in totals.values()]
    phases = {
        f"{p}_{n}": totals[p][n] if p in totals else None for p in REQUEST_PHASES for n in _FIGURES
    }
    sizes = {figure: [request[figure] for request in requests] for figure in _FIGURES}
    verdict, time = document["verdict"], document["time"]
    rates = document["throughput"]
    values = {
        **experiment_values(run.manifest),
        **document["memory"],
        **time,
        "run": name,
        **phases,
        **{f"request_{name}": None if None in of else sum(of) for name, of in sizes.items()},
        "unattributed_count": document["unattributed"]["count"],
        "verdict": None if verdict is None else verdict["verdict"],
        "time_basis": time["basis"],
        **rates,
        "request_tokens_per_s": rates["output_tokens_per_s"],
    }
    if served is not None:
        values |= {
            "server": served.server,
            "served_ttft_s": served.ttft_s,
            "served_tpot_s": served.tpot_s,
            "served_tokens_per_s": served.output_tokens_per_s,
        }
    return {column: values.get(column) for column in SUMMARY_SCHEMA}


def experiment_values(manifest: Manifest) -> Row:
    """The source and what is known of the experiment, by the names of columns."""
    experiment = manifest.experiment
    stored = experiment.as_dict()
    return {
        **(stored.get("workload") or {}),
        **(stored.get("program") or {}),
        **stored,
        **picked(experiment, "n_layers"),
        "model": experiment.model_name,
        "source": manifest.source.value,
    }


def _whole(total: Mapping[str, Any]) -> dict[str, Any]:
    """The total, with unknown bytes if a part of them is unknown."""
    unknown = {figure: None for figure in _FIGURES if figure.endswith("bytes")}
    return {**total, **(unknown if "n_unsized" in total else {})}


def summary_frame(rows: Sequence[Row]) -> pl.DataFrame:
    """The rows as the table of summary.parquet."""
    return pl.DataFrame(rows, schema=SUMMARY_SCHEMA, orient="row")


def summary_table(rows: Sequence[Row], options: Sequence[Mapping[str, Any]]) -> ViewTable:
    """One line per run, with those `options` that differ between runs; counts are in summary.parquet."""
    names = dict.fromkeys(name for of_run in options for name in of_run if name not in _SHOWN)
    differing = [n for n in names if len({of_run.get(n) for of_run in options}) > 1]
    has_time = any(row["ttft_s"] is not None for row in rows)
    times = {"TTFT_s": "ttft_s", "TPOT_s": "tpot_s"} if has_time else {}
    if any(row["server"] for row in rows):
        times |= {"served\nTTFT_s": "served_ttft_s", "served\nTPOT_s": "served_tpot_s"}
    totals = ("wire\nper request_bytes", "fits#")
    has_prices = any("token_prices" in row for row in rows)
    dollars = {"$/M in": "input", "$/M out": "output"} if has_prices else {}
    return table(
        ("model", "slice", "plan", *differing, "source", *totals, *times, *dollars),
        (
            (
                (row["model"] or "").rsplit("/", 1)[-1],
                row["topology"],
                row["plan"],
                *(str(of_run.get(name, "")) for name in differing),
                row["source"],
                row["request_wire_bytes"],
                {True: "yes", False: "NO", None: UNKNOWN_LABEL}[row["fits"]],
                *(known(row[name]) for name in times.values()),
                *(
                    f"{row['token_prices'][kind]:,.3g}" if row["token_prices"] else UNKNOWN_LABEL
                    for kind in dollars.values()
                ),
            )
            for row, of_run in zip(rows, options, strict=True)
        ),
    )


def basis_of_rows(rows: Sequence[Row]) -> str:
    """The bases of all times."""
    bases = "+".join(row["time_basis"] for row in rows if row["time_basis"] is not None)
    return ", ".join(sorted({plain(basis) for basis in bases.split("+")}))
