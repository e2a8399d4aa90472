"""The memory that a plan needs on one device, as far as closed formulas know it."""

from dataclasses import replace

from meshscope.prediction.vllm_engine import stored_vocab
from meshscope.spec.experiment import Experiment
from meshscope.spec.plan.caches import device_cache_bytes
from meshscope.spec.plan.memory import Memory
from meshscope.spec.plan.stages import stage_layers
from meshscope.spec.plan.weights import Weight, device_weight_bytes, layer_bytes, outer_weights
from meshscope.spec.program import Engine


def predicted_memory(experiment: Experiment) -> Memory:
    """The memory of one device, in bytes; with a pipeline, a device of the fullest stage.

    Our pipeline is one program for all stages, so that each has room for as many layers of a kind as
    any stage has, and for embedding and head; a stage of vLLM holds what it needs.

    Weights and cache are there all the time. Temporary buffers (activations, attention scores, the
    weights that fsdp has gathered at one time) are unknown, and with them the total: `fits` is False
    where weights and cache alone exceed the HBM, and never True, because that they do not is no proof.
    """
    weights_bytes, kv_cache_bytes = _held_bytes(experiment)
    hbm_bytes = experiment.topology.chip.device_hbm_bytes
    is_too_large = hbm_bytes is not None and weights_bytes + kv_cache_bytes > hbm_bytes
    return Memory(
        weights_bytes=weights_bytes,
        kv_cache_bytes=kv_cache_bytes,
        temp_bytes=None,
        total_bytes=None,
        hbm_bytes=hbm_bytes,
        fits=False if is_too_large else None,
    )


def _held_bytes(experiment: Experiment) -> tuple[int, int]:
    """Bytes of weights and of cache on one device, or on one of the fullest stage."""
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    if experiment.engine is Engine.MESHSCOPE:
        weights_bytes = device_weight_bytes(model, plan, workload.weight_dtype)
        return weights_bytes, device_cache_bytes(model, plan, workload)
    stages = enumerate(stage_layers(model.n_layers, plan.pp))
    return max((_stage_bytes(experiment, stage, layers) for stage, layers in stages), key=sum)


def _stage_bytes(experiment: Experiment, stage: int, indices: range) -> tuple[int, int]:
    """Bytes of weights and of cache on a worker of this stage of vLLM.

    The first stage holds the embedding, the last the final norm and the head; a head that is tied
    to the embedding makes the last stage hold the embedding, too.
    """
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    model = replace(model, vocab=stored_vocab(model))
    is_first, is_last = stage == 0, stage == plan.pp - 1
    embed, norm, *head = outer_weights(model, plan)
    layers = model.layers[indices.start : indices.stop]
    weights: list[Weight] = []
    if is_first or (is_last and model.has_tied_embeddings):
        weights.append(embed)
    if is_last:
        weights += [norm, *head]
    dtype = workload.weight_dtype
    weights_bytes = sum(weight.local_bytes(plan, dtype) for weight in weights)
    weights_bytes += sum(layer_bytes(model, plan, layer, dtype) for layer in layers)
    return weights_bytes, device_cache_bytes(model, plan, workload, layers)
