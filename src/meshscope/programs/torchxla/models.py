"""A transformers model on the meta device, whose parameters become sharded program arguments."""

# pyright: reportMissingImports=false
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch_xla.distributed.spmd.xla_sharding import apply_xla_patch_to_nn_linear

from meshscope.errors import SpecError
from meshscope.model.arrays import Dim, mesh_axes_of
from meshscope.model.quantization import quantization_of
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Partitioner
from meshscope.plans.stages import stacked_layers
from meshscope.programs.torchxla.configs import hugging_face_config
from meshscope.programs.torchxla.layouts import Rule, Spec, rules_of
from meshscope.programs.torchxla.replaced import replace_modules
from meshscope.programs.torchxla.tensors import SCALES, TORCH_DTYPES, Tensors, all_gather
from meshscope.units import format_bytes

_OF_LAYER = re.compile(r"(?P<before>model\.layers\.)(?P<layer>\d+)(?P<behind>\..*)")
FP8 = torch.float8_e4m3fn
MAX_NAMED = 4  # parameters listed in an error message


def meta_model(tensors: Tensors, *, attention: str) -> Any:
    """Build the model of the experiment with transformers on torch's meta device.

    Rotary embeddings have computed values, so they are built with memory.
    """
    experiment = tensors.experiment
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**hugging_face_config(experiment.model))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        replace_modules(model, tensors)
    workload = experiment.workload
    is_quantized = quantization_of(workload.weight_dtype) is not None
    # The modules compute in the dtype of their weights.
    model = model.to(
        TORCH_DTYPES[workload.activation_dtype if is_quantized else workload.weight_dtype]
    )
    if experiment.program.partitioner is Partitioner.MANUAL:
        # torch_xla's patch: a matmul that does not flatten all tokens into one dimension.
        apply_xla_patch_to_nn_linear(model)
        model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(
        config=config
    )  # float32, as loaded models
    return model.eval()


def with_arguments(model: Any, tensors: Tensors) -> dict[str, Any]:
    """Replace every parameter and buffer by a program argument; returns the known values.

    SpecError if the plan has no rule for a parameter.
    """
    experiment = tensors.experiment
    rules = rules_of(experiment.model, experiment.plan, experiment.workload.weight_dtype)
    _check_rules(experiment, dict(model.named_parameters(remove_duplicate=True)), rules)
    shared: dict[int | str, Any] = {}
    values: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full, layers = stacked_name(f"{path}.{name}", tensors)
            key = full if layers else id(parameter)
            if key not in shared:
                shared[key] = _argument(tensors, full, parameter, rules, layers)
            del module._parameters[name]
            module.__dict__[name] = shared[key]
            if callable(shared[key]):
                is_of_experts = rules[full].dims[0] is Dim.EXPERT
                tensors.made.append((module, name, shared[key], is_of_experts))
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            full, layers = stacked_name(f"{path}.{name}", tensors)
            if not buffer.is_meta:
                values[full] = buffer.detach().float().numpy()
            if full not in shared:
                spec = ((),) * buffer.dim()
                array = tensors.argument(full, buffer.shape, buffer.dtype, spec, layers=layers)
                shared[full] = tensors.of_stage(array, spec) if layers else array
            module._buffers[name] = shared[full]
    return values | _scales(model, tensors)


def _scales(model: Any, tensors: Tensors) -> dict[str, Any]:
    """Values of scales that are not in the model's memory: of Gemma's embedding and of complex numbers."""
    values: dict[str, Any] = {}
    scale = getattr(model.model.embed_tokens, "scalar_embed_scale", None)
    if scale is not None:
        values["model.embed_tokens.embed_scale"] = np.float32(scale)
    if (
        tensors.experiment.model.family.traits.experts == "deepseek_v2"
    ):  # rotates by complex numbers
        # An argument, as torch_xla does not trace the scale as a constant.
        name, rotary = "model.rotary_emb.attention_scaling", model.model.rotary_emb
        values[name] = np.float32(rotary.attention_scaling)
        rotary.attention_scaling = tensors.argument(name, (), torch.float32, ())
    return values


def stacked_name(name: str, tensors: Tensors) -> tuple[str, tuple[int | None, ...]]:
    """The argument of a parameter in the manual region, and the layers whose arrays it stacks; () for others."""
    match, experiment = _OF_LAYER.fullmatch(name), tensors.experiment
    if match is None or not tensors.layouts.has_region:
        return name, ()
    layers = stacked_layers(experiment.model.layers, experiment.plan.pp)[int(match["layer"])]
    first = next(layer for layer in layers if layer is not None)
    return f"{match['before']}{first}{match['behind']}", layers


def norms_before_blocks(layer: Any) -> tuple[Any, Any]:
    """The norms before attention and before the MLP of a layer of transformers."""
    of_mlp = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
    return layer.input_layernorm, of_mlp


def _argument(
    tensors: Tensors,
    name: str,
    parameter: Any,
    rules: Mapping[str, Rule],
    layers: tuple[int | None, ...],
) -> Any:
    """The argument of a parameter, a stage's local shard of it, or a function that makes the weight of it."""
    shape, rule = tuple(parameter.shape), rules[name]
    spec, stored = rule.spec(shape, tensors.layouts), rule.stored_shape(shape)

    def argument(name: str, shape: tuple[int, ...], dtype: torch.dtype, spec: Spec) -> Any:
        tensor = tensors.argument(name, shape, dtype, spec, layers=layers)
        return tensors.of_stage(tensor, spec) if layers else tensor

    scales = None
    if rule.scale is not None:
        blocks = (*stored[:-2], *(-(-size // rule.scale.block) for size in stored[-2:]))
        of_blocks = rule.scale.spec(blocks, tensors.layouts)
        scales = argument(name + SCALES, blocks, torch.float32, of_blocks)
    local = argument(name, stored, parameter.dtype if scales is None else FP8, spec)
    if not layers and scales is None:
        return local if stored == shape else local.reshape(shape)
    n_of_experts = int(rule.dims[0] is Dim.EXPERT)  # the expert dimension stays sharded by ep
    dims = [dim for dim, axes in enumerate(spec) if "fsdp" in axes and dim >= n_of_experts]

    is_added = _is_added_to_sums(name, rules, tensors)
    is_first: Any = tensors.rank("tp") == 0 if is_added else None

    def whole() -> Any:
        x = local
        for dim in dims if layers else ():
            assert spec[dim] == ("fsdp",)
            x = all_gather(x, dim, tensors.groups("fsdp"))
        if rule.scale is not None:
            x = _dequantized(x, scales, rule.scale.block, parameter.dtype)
        x = x if rule.n_stacked == 1 else x.reshape(x.shape[0], -1, *x.shape[3:])
        # A bias of a product that tp splits is added on the first device of tp only.
        return torch.where(is_first, x, torch.zeros_like(x)) if is_added else x

    return whole if dims or scales is not None else whole()


def _dequantized(values: Any, scales: Any, block: int, dtype: torch.dtype) -> Any:
    """[..., out, in]: values times a scale for each block of outputs and inputs."""
    *_, n_out, n_in = values.shape
    padded = torch.nn.functional.pad(values.to(dtype), (0, -n_in % block, 0, -n_out % block))
    *others, of_out, of_in = scales.shape
    blocks = padded.reshape(*others, of_out, block, of_in, block)
    scaled = (blocks * scales[..., :, None, :, None]).to(dtype)
    return scaled.reshape(padded.shape)[..., :n_out, :n_in]


def _is_added_to_sums(name: str, rules: Mapping[str, Rule], tensors: Tensors) -> bool:
    """Whether this is a bias of a product that tp splits, whose parts the manual region sums."""

    def has_tp(rule: Rule) -> bool:
        return any("tp" in mesh_axes_of(dim, tensors.layouts.plan) for dim in rule.dims)

    if not name.endswith("bias"):
        return False
    weight = rules.get(name.removesuffix("bias") + "weight", rules.get(name.removesuffix("_bias")))
    return weight is not None and has_tp(weight) and not has_tp(rules[name])


def _check_rules(experiment: Experiment, named: dict[str, Any], rules: Any) -> None:
    missing = {name: p for name, p in named.items() if name not in rules}
    if not missing:
        return
    largest = sorted(missing, key=lambda name: -missing[name].numel())[:MAX_NAMED]
    shown = ", ".join(
        f"{name} {list(missing[name].shape)} ({format_bytes(missing[name].nbytes)})"
        for name in largest
    )
    more = f" and {len(missing) - len(largest)} more" if len(missing) > len(largest) else ""
    total = format_bytes(sum(p.nbytes for p in missing.values()))
    raise SpecError(
        f"the plan has no rule for {len(missing)} parameters of {experiment.model.name} in transformers: "
        f"{shown}{more}; every device would replicate all {total}. Use --frontend jax, or add the "
        "family's names to model/families.toml."
    )
