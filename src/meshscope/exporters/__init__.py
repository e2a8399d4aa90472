"""Runs in the forms of other tools: timelines, tables, execution traces, workload cards."""
