"""Programs written in each front end, and the partitioned modules they lower to."""
