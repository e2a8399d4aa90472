"""Writes runs in the formats of other tools: timelines, tables, execution traces, workload cards."""
