"""The JAX programs: one decoder for every family, sharded by a plan."""
