"""An entry of the model catalog, and how entries are written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshscope.spec.model.catalog_variants import VARIANTS

AICONFIGURATOR = "ai-dynamo/aiconfigurator@095f58a model_configs"
LITGPT = "Lightning-AI/litgpt@2685705 litgpt/config.py"
MAXTEXT = "AI-Hypercomputer/maxtext@e591f30 configs/models"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A published config."""

    name: str
    config: Mapping[str, Any]
    source: str

    @property
    def variants(self) -> tuple[str, ...]:
        """Ids of models with the same sizes."""
        return VARIANTS.get(self.name, ())


def sizes(*, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """The sizes of a config with grouped queries, by their keys."""
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def entry(
    name: str,
    *parts: Mapping[str, Any],
    source: str = AICONFIGURATOR,
    **values: object,
) -> CatalogEntry:
    """Merge the parts of a config; later parts and `values` replace the earlier ones."""
    config = {key: value for part in (*parts, values) for key, value in part.items()}
    return CatalogEntry(name=name, config=config, source=source)
