# transformers exports a table of 3,000 names, which costs pyright a fifth of its time.
from typing import Any

def __getattr__(name: str) -> Any: ...
