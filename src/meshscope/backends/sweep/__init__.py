"""Many experiments of one file, on this machine, a Ray cluster or TPU slices."""
