"""The JSON Schema of CCL-Bench's workload card, and a validator for the keywords that it uses.

Source: workload_card_template.yaml of cornell-sysphotonics/ccl-bench@1d257f0. Every field of the
template is required; unknown and inapplicable values are null. Other keys are allowed, because
CCL-Bench displays them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
_SIZE: Schema = {"type": "integer", "minimum": 1}
_NUMBER: Schema = {"type": ["number", "null"], "minimum": 0}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


CARD_SCHEMA: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "CCL-Bench workload card",
    **_object(
        version={"type": "integer", "enum": [1]},
        description={"type": "string", "minLength": 1},
        hf_url=_TEXT,
        trace_url=_TEXT,
        contributor=_TEXT,
        contact=_TEXT,
        workload=_object(
            model=_object(
                phase={"type": "string", "enum": ["training", "inference", "serving"]},
                moe={"type": ["boolean", "null"]},
                granularity={
                    "type": "string",
                    "enum": ["model_fwd_bwd_pass", "model_fwd", "layer", "kernel"],
                },
                model_family=_TEXT,
                precision=_TEXT,
                epochs=_COUNT,
                iteration=_COUNT,
                model_arch=_object(
                    num_params=_COUNT,
                    num_params_active=_COUNT,
                    num_params_embedding=_COUNT,
                    num_layers=_COUNT,
                    num_heads=_COUNT,
                    head_dim=_COUNT,
                ),
            ),
            data=_object(batch_size=_COUNT, seq_len=_COUNT, output_len=_COUNT, dataset=_TEXT),
            hardware=_object(
                network_topo=_object(
                    topology=_TEXT, bandwidth_gbps=_list(_NUMBER, minItems=2, maxItems=2)
                ),
                xpu_spec=_object(
                    type={"type": "string", "enum": ["TPU", "GPU", "CPU"]},
                    model={"type": "string", "minLength": 1},
                    total_count=_SIZE,
                    count_per_node=_SIZE,
                ),
                driver_version=_TEXT,
            ),
        ),
        **{
            "Model-executor": _object(
                framework=_object(name=_TEXT, compiler_tool_selection=_TEXT),
                model_plan_parallelization=_object(
                    dp_replicate=_SIZE,
                    dp_shard=_SIZE,
                    tp=_SIZE,
                    pp=_SIZE,
                    cp=_SIZE,
                    ep=_SIZE,
                    pp_mb=_SIZE,
                ),
                communication_library=_object(name=_TEXT, version=_TEXT, env={"type": "object"}),
                protocol_selection=_list({"type": "string"}),
            )
        },
        metric_source=_object(
            traces=_list({"type": "string", "enum": ["json_tpu", "json", "nsys"]}),
            metrics_specific_trace=_list({"type": "string"}),
        ),
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
