"""The `sharding={...}` of arguments and results: how each factor of the mesh holds them."""

import re
from math import prod

import numpy as np

from meshscope.errors import ParseError
from meshscope.readers.hlo.groups import parse_groups
from meshscope.readers.hlo.module import pieces
from meshscope.readers.lint.states import REPLICATED, UNKNOWN, Factors, split

_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))?")
_MESH = re.compile(
    r"(mesh\[[^\]]*\](?:,\s*device_ids=\([^()]*(?:\([\d,]*\))?[^()]*\))?),\s*\[(.*?)\](?:,|$)"
)
_SUBGROUPS = re.compile(r"last_tile_dims=\{([^}]*)\}")


def held_by_sharding(text: str, factors: Factors) -> tuple[int, ...] | None:
    """How each factor holds an array with this sharding; None if the text is of an unknown form.

    The forms are from XLA's xla/hlo/ir/hlo_sharding.cc and named_sharding.cc.
    """
    text = text.strip().removeprefix("{").removesuffix("}").strip()
    n = len(factors.all)
    if text == "replicated" or re.fullmatch(r"mesh\[[^\]]*\],\s*replicated", text):
        return (REPLICATED,) * n
    tiles = _tiles(text, factors.mesh.n_devices)
    if tiles is None:
        return None
    dims = ([dim for dim, ids in enumerate(tiles) if factors.along(f, ids)] for f in range(n))
    return tuple(UNKNOWN if len(of) > 1 else split(of) if of else REPLICATED for of in dims)


def shardings_of_tuple(text: str) -> list[str]:
    """The shardings of the elements of a tuple."""
    inner = text.strip()
    if not inner.startswith("{{"):
        return [inner]
    return [one.strip() for one in pieces(re.sub(r"/\*[^*]*\*/", "", inner[1:-1]))]


def _tiles(text: str, n_devices: int) -> list[list[int]] | None:
    """For each dim of an array, the number of the part that each device holds; None for another form."""
    if (match := _MESH.search(text)) is not None:
        try:
            each = [
                parse_groups(f"{match[1]} {{{dim}}}", n_devices=n_devices, where="")
                for dim in re.findall(r"\{([^{}]*)\}", match[2])
            ]
        except ParseError:
            return None
        places = [{d: i for group in groups for i, d in enumerate(group)} for groups in each]
        return [[of[device] for device in range(n_devices)] for of in places]
    match = _TILES.search(text)
    sizes = _ints(match[1]) if match else []
    if match is None or prod(sizes) != n_devices:
        return None
    ids = np.array(_ints(match[4] or "") or range(n_devices))
    if match[2]:
        ids = ids.reshape(_ints(match[2])).transpose(_ints(match[3] or "") or None).ravel()
    subgroups = _SUBGROUPS.search(text)
    kinds = subgroups[1].split(",") if subgroups else []
    if len(ids) != n_devices or {kind.strip() for kind in kinds} - {"replicated"}:
        return None
    n_dims = len(sizes) - (1 if "last_tile_dim_replicate" in text else len(kinds))
    places = np.empty((len(sizes), n_devices), dtype=int)
    places[:, ids] = np.array(np.unravel_index(np.arange(n_devices), sizes))
    return places[:n_dims].tolist()


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
