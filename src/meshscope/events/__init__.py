"""The event table: one schema for predicted, compiled and measured."""
