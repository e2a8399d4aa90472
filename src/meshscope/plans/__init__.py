"""The parallel plan and what follows from it: mesh, weights, caches, stages, dispatch, kernels."""
