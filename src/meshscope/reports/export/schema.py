"""The JSON Schema of CCL-Bench's workload card, and a validator for the keywords that it uses.

Source: workload_card_template.yaml of cornell-sysphotonics/ccl-bench@1d257f0. Every field of the
template is required; unknown and inapplicable values are null. Other keys are allowed, because
CCL-Bench displays them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": ["string", "null"]}
_NAME: Schema = {"type": "string", "minLength": 1}
_FLAG: Schema = {"type": ["boolean", "null"]}
_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
_SIZE: Schema = {"type": "integer", "minimum": 1}
_NUMBER: Schema = {"type": ["number", "null"], "minimum": 0}

# Axes of a plan by their fields in the card.
CARD_AXES = {
    "dp_replicate": "dp",
    "dp_shard": "fsdp",
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "ep": "ep",
}


def _object(properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _each(names: str, schema: Schema) -> Schema:
    return dict.fromkeys(names.split(), schema)


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _one_of(*values: Any, of: str = "string") -> Schema:
    return {"type": of, "enum": list(values)}


_MODEL = {
    "phase": _one_of("training", "inference", "serving"),
    "moe": _FLAG,
    "granularity": _one_of("model_fwd_bwd_pass", "model_fwd", "layer", "kernel"),
    **_each("model_family precision", _TEXT),
    **_each("epochs iteration", _COUNT),
    "model_arch": _object(
        _each(
            "num_params num_params_active num_params_embedding num_layers num_heads head_dim",
            _COUNT,
        )
    ),
}
_HARDWARE = {
    "network_topo": _object(
        {"topology": _TEXT, "bandwidth_gbps": _list(_NUMBER, minItems=2, maxItems=2)}
    ),
    "xpu_spec": _object(
        {
            "type": _one_of("TPU", "GPU", "CPU"),
            "model": _NAME,
            **_each("total_count count_per_node", _SIZE),
        }
    ),
    "driver_version": _TEXT,
}
_EXECUTOR = {
    "framework": _object(_each("name compiler_tool_selection", _TEXT)),
    "model_plan_parallelization": _object(
        _each(f"{' '.join(CARD_AXES)} pp_mb", {**_SIZE, "type": ["integer", "null"]})
    ),
    "communication_library": _object({**_each("name version", _TEXT), "env": {"type": "object"}}),
    "protocol_selection": _list({"type": "string"}),
}
_WORKLOAD = {
    "model": _object(_MODEL),
    "data": _object({**_each("batch_size seq_len output_len", _COUNT), "dataset": _TEXT}),
    "hardware": _object(_HARDWARE),
}
CARD_SCHEMA: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "CCL-Bench workload card",
    **_object(
        {
            "version": _one_of(1, of="integer"),
            "description": _NAME,
            **_each("hf_url trace_url contributor contact", _TEXT),
            "workload": _object(_WORKLOAD),
            "Model-executor": _object(_EXECUTOR),
            "metric_source": _object(
                {
                    "traces": _list(_one_of("json_tpu", "json", "nsys")),
                    "metrics_specific_trace": _list({"type": "string"}),
                }
            ),
        }
    ),
}

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def faults_of(
    value: Any, schema: Mapping[str, Any] = CARD_SCHEMA, at: str = "card"
) -> Iterator[str]:
    """The violations of the schema, each with its path."""
    types = schema.get("type", [])
    names = [types] if isinstance(types, str) else types
    if names and not any(_is_of(value, name) for name in names):
        yield f"{at}: {value!r} is not {' or '.join(names)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        yield f"{at}: {value} is below {schema['minimum']}"
    if isinstance(value, str | list):
        yield from _length_faults(value, schema, at)
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from faults_of(item, schema.get("items", {}), f"{at}[{index}]")
    if isinstance(value, dict):
        yield from (
            f"{at}: '{name}' is missing" for name in schema.get("required", ()) if name not in value
        )
        for name, of_property in schema.get("properties", {}).items():
            if name in value:
                yield from faults_of(value[name], of_property, f"{at}.{name}")


def _length_faults(value: str | list[Any], schema: Mapping[str, Any], at: str) -> Iterator[str]:
    least = schema.get("minLength" if isinstance(value, str) else "minItems", 0)
    most = len(value) if isinstance(value, str) else schema.get("maxItems", len(value))
    if not least <= len(value) <= most:
        yield f"{at}: has length {len(value)}, not {least} to {most}"


def _is_of(value: Any, name: str) -> bool:
    is_bool = isinstance(value, bool)
    return isinstance(value, _TYPES[name]) and (not is_bool or name == "boolean")
