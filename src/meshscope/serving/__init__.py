"""The best plan for a model, what fits on a slice, and a serving engine under load."""
