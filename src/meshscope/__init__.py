"""See every byte that a large language model moves across a TPU slice, before you rent one."""

__version__ = "0.1.0"
