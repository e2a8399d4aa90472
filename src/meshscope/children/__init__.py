"""Child processes: how they are started and heard, what they leave, and how their ends are worded."""
