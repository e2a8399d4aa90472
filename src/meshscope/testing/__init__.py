"""The pytest plugin: assertions on the collectives of a user's functions."""
