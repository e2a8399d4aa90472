"""Operators that transformers uses and torch_xla does not have, made of those that it has.

Without them torch_xla would compute on the host, and a tensor without memory has nothing to compute.
"""

# pyright: reportMissingImports=false
from functools import cache
from typing import Any

import torch


@cache
def add_operators() -> torch.library.Library:
    """Registers them with torch, once; they last as long as the process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("polar", _polar, "XLA")
    return library


def _polar(magnitude: Any, angle: Any) -> Any:
    """DeepSeek-V2's rotary embedding: complex numbers of magnitude and angle."""
    parts = torch.stack([magnitude * torch.cos(angle), magnitude * torch.sin(angle)], dim=-1)
    return torch.view_as_complex_copy(parts)  # below functionalisation
