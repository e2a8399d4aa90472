"""Everything a user names: the model, the plan, the topology, the workload and the program."""
