"""The runs of a sweep side by side: one row a run, for `summary.parquet`, for --json and as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from rich.table import Table
from rich.text import Text

from meshscope.events.enums import Phase
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes, format_seconds
from meshscope.views.document import run_document
from meshscope.views.plain import plain
from meshscope.views.tables import new_table

Row = dict[str, Any]

_FIGURES = ("count", "payload_bytes", "wire_bytes")

# Columns of summary.parquet. Figures are those of one device, of the strongest source of the run; null
# is unknown. PHASE_* are of one step of the phase, request_* of all steps of a request.
SUMMARY_SCHEMA: dict[str, Any] = {
    "run": pl.String,  # the folder's name
    "source": pl.String,
    "model": pl.String,
    "n_layers": pl.Int64,
    "topology": pl.String,
    "n_devices": pl.Int64,
    "plan": pl.String,
    "engine": pl.String,
    "frontend": pl.String,
    "partitioner": pl.String,
    "layers_are": pl.String,
    "batch": pl.Int64,
    "prompt": pl.Int64,
    "output": pl.Int64,
    "weight_dtype": pl.String,
    "activation_dtype": pl.String,
    "cache_dtype": pl.String,
    **{
        f"{span}_{figure}": pl.Float64 if figure == "wire_bytes" else pl.Int64
        for span in (*(phase.value for phase in Phase), "request")
        for figure in _FIGURES
    },
    "unattributed_count": pl.Int64,
    "verdict": pl.String,  # of the prediction against the strongest source; null where it is alone
    **dict.fromkeys(
        ("weights_bytes", "kv_cache_bytes", "temp_bytes", "total_bytes", "hbm_bytes"), pl.Int64
    ),
    "fits": pl.Boolean,
    **dict.fromkeys(("prefill_s", "decode_step_s", "ttft_s", "tpot_s", "e2e_s"), pl.Float64),
    "time_basis": pl.String,
}


def summary_row(name: str, run: RunRecord) -> Row:
    """The figures of a run that `show --json` prints, in one row of SUMMARY_SCHEMA."""
    document = run_document(run)
    experiment = document["experiment"]
    totals: Mapping[str, Any] = document["totals"]
    requests = [figures["request"] for figures in totals.values()]
    phases = {
        f"{phase}_{figure}": totals[phase][figure] if phase in totals else None
        for phase in Phase
        for figure in _FIGURES
    }
    verdict, time = document["verdict"], document["time"]
    values = {
        **experiment["workload"],
        **experiment["program"],
        **experiment,
        **document["memory"],
        **time,
        "run": name,
        "source": document["source"],
        "model": experiment["model"]["name"],
        "n_layers": len(experiment["model"]["layers"]),
        **phases,
        **{f"request_{figure}": sum(r[figure] for r in requests) for figure in _FIGURES},
        "unattributed_count": document["unattributed"]["count"],
        "verdict": None if verdict is None else verdict["verdict"],
        "time_basis": time["basis"],
    }
    return {column: values.get(column) for column in SUMMARY_SCHEMA}


def summary_frame(rows: Sequence[Row]) -> pl.DataFrame:
    """The rows as summary.parquet holds them."""
    return pl.DataFrame(rows, schema=SUMMARY_SCHEMA, orient="row")


def summary_table(rows: Sequence[Row], told: Sequence[Mapping[str, Any]]) -> Table:
    """One line a run; `told` are the options that were given, of which those that differ are shown."""
    others = _differing(told)
    has_time = any(row["ttft_s"] is not None for row in rows)
    times = ["TTFT", "TPOT"] if has_time else []
    words = ["model", "slice", "plan", *others, "source"]
    names = ["collectives\na request", "wire\na request", "fits", *times]
    table = new_table(*words, *names, n_words=len(words))
    for row, options in zip(rows, told, strict=True):
        table.add_row(
            row["model"].rsplit("/", 1)[-1],
            row["topology"],
            row["plan"],
            *(plain(str(options.get(name, ""))) for name in others),
            row["source"],
            f"{row['request_count']:,}",
            format_bytes(row["request_wire_bytes"]),
            _fits(row["fits"]),
            *(format_seconds(row[f"{name.lower()}_s"]) for name in times),
        )
    return table


def basis_lines(rows: Sequence[Row]) -> list[Text]:
    """What the times of each source rest on."""
    found = dict.fromkeys(
        (row["source"], row["time_basis"]) for row in rows if row["time_basis"] is not None
    )
    return [Text(f"times of {source} runs: {plain(basis)}") for source, basis in found]


def _differing(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """Options besides model, slice and plan that are not the same for all."""
    shown = ("model", "topology", "plan")
    names = dict.fromkeys(name for options in told for name in options if name not in shown)
    return [name for name in names if len({options.get(name) for options in told}) > 1]


def _fits(fits: bool | None) -> Text:  # noqa: FBT001  three values
    if fits is None:
        return Text("?")
    return Text("yes", style="green") if fits else Text("NO", style="bold red")
