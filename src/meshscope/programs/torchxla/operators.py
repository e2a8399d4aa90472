"""Operators used by transformers that torch_xla lacks, composed of supported ones.

Without them torch_xla falls back to the host, which fails for tensors without memory.
"""

# pyright: reportMissingImports=false
from functools import cache
from typing import Any

import torch


@cache
def add_operators() -> torch.library.Library:
    """Register the operators with torch, once per process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("polar", _polar, "XLA")
    return library


def _polar(magnitude: Any, angle: Any) -> Any:
    """Complex numbers from magnitude and angle, for the rotary embedding of DeepSeek-V2."""
    parts = torch.stack([magnitude * torch.cos(angle), magnitude * torch.sin(angle)], dim=-1)
    return torch.view_as_complex_copy(parts)  # below functionalization
