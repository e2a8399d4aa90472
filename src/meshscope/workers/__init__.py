"""Worker processes: spawning them, their progress, results and exit status."""
