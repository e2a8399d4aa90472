"""Run folders: writing, reading, and their typed contents."""
