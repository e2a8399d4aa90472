"""What a user asks for: model, parallel plan, slice, workload and program."""
