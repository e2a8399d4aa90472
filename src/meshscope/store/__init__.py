"""A run is a folder: the only interface between making and reading."""
