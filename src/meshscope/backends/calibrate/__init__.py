"""Measures what live devices do: collectives over each mesh axis, matrices, memory; fits a profile of the chip."""
