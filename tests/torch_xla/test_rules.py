"""Rules and layouts follow the plan's own weights; configs are the inverse of the reader."""

import json

import pytest

from meshscope.model.catalog import catalog
from meshscope.model.config import model_from_config, read_model
from meshscope.plans.plan import parse_plan
from meshscope.programs.torchxla.configs import hugging_face_config
from meshscope.programs.torchxla.layouts import layouts_of, rules_of


@pytest.mark.parametrize("name", sorted(catalog()))
def test_config_reads_back_as_the_same_model(name: str) -> None:
    model = read_model(name)

    config = json.loads(json.dumps(hugging_face_config(model)))

    assert model_from_config(config, name=model.name, source=model.source) == model


@pytest.mark.parametrize(
    ("model", "plan", "parameter", "shape", "spec"),
    [
        ("Qwen/Qwen3-32B", "tp=8", "embed_tokens.weight", (151936, 5120), (("tp",), ())),
        ("Qwen/Qwen3-32B", "tp=8", "layers.3.self_attn.q_proj.weight", (8192, 5120), (("tp",), ())),
        ("Qwen/Qwen3-32B", "tp=8", "layers.3.self_attn.o_proj.weight", (5120, 8192), ((), ("tp",))),
        ("Qwen/Qwen3-32B", "tp=8", "layers.3.self_attn.q_norm.weight", (128,), ((),)),
        (
            "Qwen/Qwen3-32B",
            "fsdp=2,tp=4",
            "layers.3.mlp.down_proj.weight",
            (5120, 25600),
            (("fsdp",), ("tp",)),
        ),
        # 8 heads of keys over 16 devices: each is on two.
        (
            "Qwen/Qwen3-32B",
            "tp=16",
            "layers.3.self_attn.k_proj.weight",
            (1024, 5120),
            (("tp.kv",), ()),
        ),
        (
            "Qwen/Qwen3-32B",
            "tp=16",
            "layers.3.self_attn.q_proj.weight",
            (8192, 5120),
            (("tp.kv", "tp.rep"), ()),
        ),
        (
            "deepseek-ai/DeepSeek-V2-Lite",
            "tp=8",
            "layers.0.self_attn.kv_b_proj.weight",
            (4096, 512),
            (("tp",), ()),
        ),
        (
            "deepseek-ai/DeepSeek-V2-Lite",
            "dp=4,tp=2,ep=4",
            "layers.1.mlp.experts.gate_up_proj",
            (64, 2816, 2048),
            (("dp",), (), ("tp",), ()),
        ),
        (
            "mistralai/Mixtral-8x7B-v0.1",
            "tp=8,ep=8",
            "layers.1.mlp.experts.down_proj",
            (8, 4096, 14336),
            (("tp",), (), ()),
        ),
        ("mistralai/Mixtral-8x7B-v0.1", "tp=8", "layers.1.mlp.gate.weight", (8, 4096), ((), ())),
    ],
)
def test_rule_splits_what_the_plan_says(model, plan, parameter, shape, spec) -> None:
    described, parsed = read_model(model), parse_plan(plan)
    rule = rules_of(described, parsed)[f"model.{parameter}"]

    assert rule.spec(shape, layouts_of(described, parsed)) == spec


def test_sharding_is_written_as_xla_reads_it() -> None:
    layouts = layouts_of(read_model("Qwen/Qwen3-32B"), parse_plan("dp=2,tp=4"))

    assert layouts.sharding(((), ())) == "{replicated}"
    assert layouts.sharding((("dp",), ("tp",))) == "{devices=[2,4]0,1,2,3,4,5,6,7}"
    by_tp = "{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
    assert layouts.sharding((("tp",), ())) == by_tp
