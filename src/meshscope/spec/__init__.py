"""What a user specifies: model, parallel plan, topology, workload and program."""
