"""Mechanisms of models: attention, experts, residual streams."""
