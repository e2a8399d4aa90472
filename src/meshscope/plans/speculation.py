"""Speculative decoding: a draft proposes k tokens of each sequence, and the model verifies them in one step.

With a probability `acceptance` for each drafted token, independently of the others, a step yields
(1 - acceptance^(k + 1)) / (1 - acceptance) tokens on average (Leviathan et al., arXiv 2211.17192,
equation 1).
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from meshscope.errors import SpecError
from meshscope.model.config import read_model
from meshscope.model.layers import AttentionKind, MlpKind
from meshscope.model.mechanisms.drafts import DraftBlocks, DraftHead
from meshscope.model.model import Model
from meshscope.model.quantization import UNQUANTIZED_DTYPE, Coverage, quantization_of
from meshscope.plans.caches import device_cache_bytes
from meshscope.plans.checks import has_program_format
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import Tables
from meshscope.plans.weights import (
    block_drafts,
    device_weight_bytes,
    draft_head_weights,
    layer_bytes,
)


class DraftMethod(StrEnum):
    """What proposes the tokens."""

    MTP = "mtp"  # the multi-token prediction layer of the model's checkpoint
    EAGLE = "eagle"  # one dense layer of the model's attention (arXiv 2401.15077)
    DSPARK = "dspark"  # the blocks of the model's checkpoint that draft several tokens in one pass
    DRAFT = "draft"  # another model


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A draft of `n_drafted` tokens a step, each accepted with probability `acceptance`."""

    method: DraftMethod
    n_drafted: int
    acceptance: float
    draft_model: str | None = None  # of the method `draft`: an id or the path of a config.json

    def __str__(self) -> str:
        name = "" if self.draft_model is None else f" {self.draft_model}"
        settings = f"k={self.n_drafted}, acceptance {self.acceptance:g}"
        return f"{self.method}{name}, {settings}: {self.tokens_per_step:.2f} tokens per step"

    @property
    def n_passes(self) -> int:
        """Steps of the draft before a verification."""
        return 1 if self.method is DraftMethod.DSPARK else self.n_drafted

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens of a sequence that a step yields."""
        if self.acceptance == 1:
            return self.n_drafted + 1.0
        return (1 - self.acceptance ** (self.n_drafted + 1)) / (1 - self.acceptance)


def verification(experiment: Experiment, speculation: Speculation) -> Experiment:
    """The step that verifies the drafts: a decode step with one token more than drafted."""
    n_tokens = speculation.n_drafted + 1
    if n_tokens > experiment.workload.output - 1:
        raise SpecError(
            f"--speculate: a step of {n_tokens} tokens is longer than the decode of output="
            f"{experiment.workload.output}. Use --output {n_tokens + 1} or more, or a smaller k."
        )
    return replace(experiment, workload=replace(experiment.workload, decode_tokens=n_tokens))


def check_verification_program(experiment: Experiment) -> None:
    """Raise SpecError unless a program can verify the drafts; predictions need none."""
    frontend, model = experiment.program.frontend, experiment.model
    if model.why_explicit is not None:
        raise SpecError(
            f"--speculate: decode steps of programs of {model.name}, whose {model.why_explicit}, have one "
            "token. Use meshscope predict."
        )
    if not frontend.is_own:
        raise SpecError(
            f"--speculate: --frontend {frontend} has no programs with several tokens in a decode step. Use "
            "--frontend jax, or meshscope predict."
        )


def drafting(
    experiment: Experiment, speculation: Speculation, *, has_program: bool = False
) -> Experiment:
    """The draft on the same plan, perhaps in a format that programs have; SpecError if there is none or it does not fit."""
    model = _draft_model(experiment.model, speculation)
    plan = replace(experiment.plan, ep=1) if model.moe is None else experiment.plan
    dtype, partitioner = experiment.workload.weight_dtype, experiment.program.partitioner
    quantization = quantization_of(dtype)
    if speculation.method is DraftMethod.DRAFT:
        dtype = model.default_weight_dtype
    elif model.moe is None and quantization and quantization.coverage is Coverage.EXPERTS:
        dtype = UNQUANTIZED_DTYPE
    if has_program and not has_program_format(model, plan, dtype, partitioner):
        dtype = UNQUANTIZED_DTYPE
    if model.engram is None:
        plan = replace(plan, tables=Tables.ALL)
    workload = replace(experiment.workload, weight_dtype=dtype, prefill_chunk=None)
    if isinstance(model.draft_head, DraftBlocks):
        workload = replace(workload, decode_tokens=model.draft_head.n_tokens)
    drafted = experiment_of(
        model=model,
        plan=plan,
        topology=experiment.topology,
        workload=workload,
        program=experiment.program,
        engine=experiment.engine,
        device_order=experiment.device_order,
    )
    return drafted.with_auto_chunk()


def _draft_model(model: Model, speculation: Speculation) -> Model:
    """Another model, or a head: one layer between the embedding and the output head of the model."""
    method = speculation.method
    if method is DraftMethod.DRAFT:
        assert speculation.draft_model is not None
        return read_model(speculation.draft_model)
    drafts, is_mtp = model.drafts, method is DraftMethod.MTP
    if method is DraftMethod.DSPARK:
        if drafts is None or speculation.n_drafted > drafts.n_tokens:
            most = (
                "no blocks that draft several tokens"
                if drafts is None
                else f"blocks that draft {drafts.n_tokens}"
            )
            remedy = "Use mtp, eagle or draft:MODEL." if drafts is None else "Use a smaller k."
            raise SpecError(
                f"--speculate dspark:k={speculation.n_drafted}: {model.name} has {most}. {remedy}"
            )
        return replace(block_drafts(model), name=f"{model.name} {method}", draft_head=drafts)
    if is_mtp and drafts is not None:
        raise SpecError(
            f"--speculate mtp: {model.name} drafts with {drafts.n_blocks} blocks in one pass. Use dspark:k={drafts.n_tokens}."
        )
    if is_mtp and not model.n_mtp_layers:
        raise SpecError(
            f"--speculate mtp: {model.name} has no layer for multi-token prediction "
            "(num_nextn_predict_layers or mtp_num_hidden_layers). Use eagle or draft:MODEL."
        )
    if not is_mtp and model.ffn is None:
        raise SpecError(
            f"--speculate eagle: {model.name} has no dense layer whose width an EAGLE head would have. "
            "Use mtp or draft:MODEL."
        )
    # The layer after the last, as the last; with full attention instead of linear, as in vLLM (qwen3_next_mtp.py).
    layer = model.layers[-1] if is_mtp else replace(model.layers[0], mlp=MlpKind.DENSE)
    if layer.attention.is_linear:
        layer = replace(layer, attention=AttentionKind.FULL)
    if not layer.has_attention:  # Nemotron 3: a block of attention before one of experts
        layer = replace(layer, attention=AttentionKind.NOPE)
    return replace(
        model,
        name=f"{model.name} {method}",
        layers=(layer,),
        moe=model.moe if layer.has_experts else None,
        draft_head=DraftHead(has_norms=is_mtp),
    )


def draft_memory_bytes(draft: Experiment) -> int:
    """Weights and cache of the draft on a device; a head shares embedding and output head with the model."""
    model, plan, dtype = draft.model, draft.plan, draft.workload.weight_dtype
    if model.draft_head is None:
        weights = device_weight_bytes(model, plan, dtype)
    else:
        head = sum(weight.local_bytes(plan, dtype) for weight in draft_head_weights(model))
        weights = head + sum(layer_bytes(model, plan, layer, dtype) for layer in model.layers)
    return weights + device_cache_bytes(model, plan, draft.workload)
