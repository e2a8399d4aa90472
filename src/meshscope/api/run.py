"""`meshscope.Run`: one run, with its tables, times, memory, metrics and comparisons."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshscope.analysis.request import (
    SpeculativeStep,
    Throughput,
    request_times,
    speculative_steps,
    throughput_of,
)
from meshscope.api.console import rendered
from meshscope.errors import public, read_only
from meshscope.events.enums import Source
from meshscope.files import path_of
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.memory import Memory
from meshscope.reports.document import run_document
from meshscope.reports.model import plain
from meshscope.reports.text import answer_text, full_text, rows_text
from meshscope.reports.times import time_document
from meshscope.store.folder import new_folder, scratch_folder
from meshscope.store.run import RunRecord
from meshscope.units import format_seconds

if TYPE_CHECKING:
    import polars as pl

    from meshscope.analysis.insertion import Insertion
    from meshscope.api.compare import RunComparison
    from meshscope.api.runs import Metrics
    from meshscope.cost.memory import Capacity


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """Seconds of a step of each phase and of a request, on one device; None is unknown.

    `step_s` is one execution of a function that is neither prefill nor decode.

    Device time only: no host, no queue, no tokenization. `basis` says where it comes from. `intervals` has
    the bounds of `ttft_s`, `tpot_s`, `e2e_s` and the others, where they are known.
    """

    prefill_s: float | None
    decode_step_s: float | None
    step_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    basis: str | None
    intervals: Mapping[str, tuple[float, float]]


@read_only
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Run:
    """One run: predicted, compiled or measured; figures come from its strongest source.

    `warnings` are sentences about input that differs from what is assumed. `hlo`
    is the HLO text of a compiled function without a folder.
    """

    record: RunRecord
    warnings: tuple[str, ...] = ()
    hlo: Path | None = None

    @property
    def path(self) -> Path | None:
        """The folder of the run; None while it is in memory only."""
        return self.record.path

    @property
    def source(self) -> Source:
        """The strongest source: measured, compiled or predicted."""
        return self.record.manifest.source

    @property
    def experiment(self) -> ExperimentRecord:
        """Model, plan, topology, workload and program, typed."""
        return self.record.manifest.experiment

    @property
    def events(self) -> "pl.DataFrame":
        """The event table (docs/data.md): every collective of every source, and measured spans."""
        from meshscope.analysis.catalog import events_of  # polars is slow to import

        return events_of(self.record)

    @property
    def collectives(self) -> "pl.DataFrame":
        """The collectives of the strongest source, a row of the event table each."""
        events = self.events
        return events.filter(events["kind"].is_not_null() & (events["source"] == self.source.value))

    @property
    def time(self) -> RunTime:
        """Step and request times in seconds: measured means, else modeled."""
        time = time_document(self.record, self.source) or {}
        bounds = dict(time.get("intervals", {}))
        for name, phase in (("prefill_s", "prefill"), ("decode_step_s", "decode")):
            if (of := time.get("steps", {}).get(phase)) is not None:
                bounds[name] = (of["step"]["low_s"], of["step"]["high_s"])
        intervals = {n: (low, high) for n, (low, high) in bounds.items() if None not in (low, high)}
        seconds = {name: time.get(name) for name in RunTime.__slots__ if name != "intervals"}
        return RunTime(**seconds, intervals=intervals)

    @property
    def memory(self) -> Memory | None:
        """Bytes on one device; None for an imported run."""
        return self.record.memory.get(self.source)

    @property
    def speculation(self) -> "SpeculativeDecoding | None":
        """Speculative decoding, if the run was made with `speculate`."""
        parts, steps = self.record.speculative, speculative_steps(self.record)
        if parts is None or not steps:
            return None
        verify, draft = Run(record=parts.verify), Run(record=parts.draft)
        return SpeculativeDecoding(verify=verify, draft=draft, steps={s.source: s for s in steps})

    @property
    def throughput(self) -> Throughput | None:
        """Tokens and requests per second of the slice; None if a time or the workload is unknown."""
        request = request_times(self.record).get(self.source)
        return None if request is None else throughput_of(request, self.record)

    @property
    def capacity(self) -> "Capacity | None":
        """The largest batch and context that fit, predicted; None for an imported run or unknown HBM."""
        from meshscope.cost.memory import capacity_of_run  # only this needs it

        return capacity_of_run(self.record)

    @property
    def metrics(self) -> "Metrics":
        """Every metric of docs/metrics.md by name, as a polars table."""
        from meshscope.api.runs import metrics_of_runs  # polars is slow to import

        return metrics_of_runs({self.name: self.record})

    @property
    def name(self) -> str:
        """The name of the folder, or `run` in memory."""
        return "run" if self.path is None else self.path.resolve().name

    def compare(self, other: "Run | str | Path | None" = None) -> "RunComparison":
        """Compares the collectives of this run with another's, or with its own prediction."""
        from meshscope.api.compare import compare  # it imports this module

        return compare(self, other)

    def explain(self) -> "tuple[Insertion, ...]":
        """Why the partitioner inserted each collective, what it costs and what avoids it."""
        from meshscope.api.compare import explained

        return explained(self.record, self.hlo)

    @public
    def report(self, path: str | Path | None = None, *, force: bool = False) -> Path:
        """Writes an HTML report, by default `report.html` in the run; returns its path."""
        from meshscope.api.report import write_report  # polars is slow to import

        return write_report([self.record], None if path is None else path_of(path), force=force)

    @public
    def save(self, path: str | Path, *, force: bool = False) -> "Run":
        """Saves the run as a folder; `force` replaces a run there. Returns the run in its folder."""
        from meshscope.api.records import saved
        from meshscope.store.read import read_run  # polars is slow to import
        from meshscope.store.write import HLO

        home = path_of(path)
        if self.path is None:
            files = {} if self.hlo is None else {f"{HLO}/{self.hlo.name}": self.hlo}
            return Run(record=saved(self.record, home, force=force, files=files))
        with new_folder(home, force=force) as folder:
            shutil.copytree(self.path, folder, dirs_exist_ok=True)
        return Run(record=read_run(home))

    @public
    def sql(self, query: str) -> "pl.DataFrame":
        """The result of a DuckDB query over the views of docs/data.md, of this run alone."""
        from meshscope.api.runs import RunSet  # duckdb is slow to import

        if self.path is not None:
            return RunSet([self.path]).sql(query)
        with scratch_folder() as scratch:
            self.save(scratch / self.name)
            return RunSet([scratch / self.name]).sql(query)

    def text(self, width: int = 80, *, rows: bool = False, full: bool = False) -> str:
        """The answer that `meshscope show` prints, with --rows or with --full, without color."""
        view = rows_text if rows else answer_text
        if full:
            view = full_text
        return rendered(partial(view, self.record), width)

    def as_dict(self) -> Mapping[str, Any]:
        """The document that `--json` prints."""
        return run_document(self.record)

    def __repr__(self) -> str:
        experiment, time, topology = self.experiment, self.time, self.experiment.topology
        names = (experiment.model_name, experiment.layout, topology and topology.name)
        known = ", ".join(str(name)[:60] for name in names if name is not None)
        labels = {"TTFT": time.ttft_s, "TPOT": time.tpot_s, "step": time.step_s}
        figures = [f"{n} {format_seconds(s)}" for n, s in labels.items() if s is not None]
        where = f"in {self.path or 'memory'}"
        return f"<Run {self.source}: {', '.join([plain(known), *figures])}; {where}>"

    def _repr_html_(self) -> str:
        from meshscope.api.export import in_notebook  # polars is slow to import

        return in_notebook(self.text(rows=True), lambda pictures: pictures.run_figures(self.record))


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeDecoding:
    """Speculative decoding of a run: its two parts as runs of their own, and its step by each source."""

    verify: Run
    draft: Run
    steps: Mapping[Source, SpeculativeStep]

    @property
    def step(self) -> SpeculativeStep:
        """The step by the strongest source that has its times."""
        return list(self.steps.values())[-1]
