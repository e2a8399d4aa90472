"""Reads XPlane profiles into columns and joins their ops to the event table."""
