"""Checks a workload card against the template of CCL-Bench (`card_template.yaml`): every field is required."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,),
    "number": (int, float), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
TEMPLATE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def faults_of(
    value: Any, field: Mapping[str, Any] | None = None, at: str = "card"
) -> Iterator[str]:
    """The departures from the template, each with its path."""
    field = TEMPLATE if field is None else field
    names = field["types"].split() if "types" in field else ["object"]
    least = field.get("least")
    if type(value) not in (kind for name in names for kind in TYPES[name]):
        yield f"{at}: {value!r} is not {' or '.join(names)}"
    elif "types" not in field:
        yield from (f"{at}: '{name}' is missing" for name in field if name not in value)
        for name in filter(value.__contains__, field):
            yield from faults_of(value[name], field[name], f"{at}.{name}")
    else:
        if "among" in field and value not in field["among"]:
            yield f"{at}: {value!r} is none of {field['among']}"
        if isinstance(value, int | float) and least is not None and value < least:
            yield f"{at}: {value} is below {least}"
        if value == "" and least:
            yield f"{at}: is empty"
        if isinstance(value, list):
            if field.get("n_items") not in {None, len(value)}:
                yield f"{at}: has length {len(value)}, not {field['n_items']}"
            for index, item in enumerate(value):
                yield from faults_of(item, field["items"], f"{at}[{index}]")
