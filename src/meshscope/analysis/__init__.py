"""Pure functions over event tables."""
