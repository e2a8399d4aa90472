"""How families name the tensors of their experts in a Hugging Face checkpoint."""

from collections.abc import Mapping

from meshscope.arch.model import Family


def moe_block(family: Family) -> str:
    """Where the router's tensors are, under the layer."""
    match family:
        case Family.MIXTRAL:
            return "block_sparse_moe.gate."
        case Family.GPT_OSS:
            return "mlp.router."
        case _:
            return "mlp.gate."


def expert_tensors(family: Family) -> Mapping[str, str]:
    """The tensors of one expert, `{expert}`, by their role in the gated MLP."""
    if family is Family.MIXTRAL:
        base, names = "block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2")
    else:
        base, names = "mlp.experts.{expert}.", ("gate_proj", "up_proj", "down_proj")
    roles = ("gate", "up", "down")
    return {role: f"{base}{name}.weight" for role, name in zip(roles, names, strict=True)}
