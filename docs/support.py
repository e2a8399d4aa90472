"""What is supported, asked of the code: the axes of each front end and family, and the versions of compilers.

For cog: `families`, `compilers` and `compared` print Markdown tables.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from meshscope.errors import MeshscopeError
from meshscope.hardware.chips import CHIPS, ChipKind
from meshscope.hardware.compiler_facts import FITTED_CONSTANTS, read_facts
from meshscope.hardware.topology import parse_topology
from meshscope.model.catalog import catalog
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Frontend, Loop, Partitioner, Program
from meshscope.plans.workload import Workload
from meshscope.programs.torchxla.configs import check_traceable

ROOT = Path(__file__).parents[1]
GOLDEN_HLO = ROOT / "tests" / "golden" / "hlo"
COMPILE_TESTS = ROOT / "tests" / "compile"

FAMILY_NAMES = {
    "llama": "Llama",
    "mistral": "Mistral, Ministral",  # the latter: a config.json of one
    "ministral3": "Ministral 3",
    "phi3": "Phi-3, Phi-4",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4 dense",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "llama4_text": "Llama 4",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5 dense",
    "qwen3_5_moe_text": "Qwen3.5 with experts",
    "qwen4_exp_text": "Qwen3.8",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "step3p5": "Step-3.5 and 3.7",
    "kimi_linear": "Kimi Linear",
    "glm5_next_text": "GLM-5.3-Flash",
    "nemotron_h": "Nemotron-H, Nemotron 3",
    "glm4_moe": "GLM-4.5, Solar Open",
    "minimax_m2": "MiniMax-M2",
    "minimax_m3_vl_text": "MiniMax-M3",
    "hy_v3": "Hy3",
    "ernie4_5_moe": "ERNIE 4.5 with experts",
    "qwen2_moe": "Qwen2-MoE",
    "olmoe": "OLMoE",
    "dots1": "dots.llm1",
    "deepseek": "DeepSeek-MoE",
    "bailing_moe": "Ling, Ring",
    "bailing_hybrid": "Ling 3",
    "grok1": "Grok-2",
    "ernie4_5": "ERNIE 4.5 dense",
    "granite": "Granite 3",
    "smollm3": "SmolLM3",
    "cohere": "Command R",
    "cohere2": "Command A, R7B",
    "gemma": "Gemma",
    "glm": "GLM-4-9B",
    "glm4": "GLM-4-0414",
    "olmo2": "OLMo 2",
    "apertus": "Apertus",
    "olmo3": "Olmo 3",
    "exaone4": "EXAONE 4",
    "exaone_moe": "K-EXAONE",
    "mistral4": "Mistral Large 3 and Small 4",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3 (V3.1, R1)",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm_moe_dsa": "GLM-5",
    "deepseek_v4": "DeepSeek-V4",
    "deepseek_v41_text": "DeepSeek-V4.1",
}
# Models whose parts differ from those of their family: they have a row after that of this family.
VARIANTS = {
    "gemma4_text": ("Gemma 4 E2B, E4B", "google/gemma-4-E2B-it"),
    "llama4_text": ("Gemma 4 with experts", "google/gemma-4-26B-A4B-it"),
}
# A plan of eight devices that uses the axis.
PLANS = {
    "tp": "dp=4,tp=2",
    "sp": "dp=4,tp=2,sp",
    "dp": "dp=8",
    "fsdp": "fsdp=8",
    "pp": "pp=2,dp=4",
    "cp": "dp=4,cp=2",
    "ep": "dp=8,ep=8",
}
PROGRAMS = {
    "JAX": Program(),
    "JAX, `--partitioner auto`": Program(partitioner=Partitioner.AUTO),
    "TorchXLA": Program(frontend=Frontend.TORCHXLA),
}


def families() -> None:
    """Prints the axes that each program supports, families with equal axes in one row."""
    _print(("family", *PROGRAMS), _merged(_cells()))


def compilers() -> None:
    """Prints, for each chip, the compilers whose programs the tests read, and where its constants come from."""
    fits = read_facts(FITTED_CONSTANTS)["libtpu"]
    rows: list[tuple[str, ...]] = []
    for chip in (chip for chip in CHIPS.values() if chip.kind is ChipKind.TPU):
        read = "; ".join(_compilers_of(chip.name)) or "none"
        fitted = [v for v in fits if fits[v]["chips"].get(chip.name, {}).get("collectives")]
        rows.append((chip.name, read, f"libtpu {', '.join(fitted) or 'none'}"))
    head = ("chip", "programs read in the tests", "constants of its collectives")
    _print(head, _merged(rows))


def compared() -> None:
    """Prints the plans under which the tests compile a small model of every family."""
    sys.path[:0] = [str(COMPILE_TESTS), str(COMPILE_TESTS.parent / "shared")]
    from small_configs import EXPERT_PLANS, OTHER_PLAN, OTHER_SLICES, PLANS  # noqa: PLC0415

    forms = {Loop.SCAN: "scanned", Loop.UNROLL: "unrolled"}
    rows = [
        *(("all", "v6e-8", f"`{plan}`", forms[loop]) for plan, loop in PLANS),
        *(("with experts", "v6e-8", f"`{plan}`", forms[loop]) for plan, loop in EXPERT_PLANS),
        ("all", f"one of {', '.join(OTHER_SLICES)}", f"`{OTHER_PLAN}`", forms[Loop.UNROLL]),
    ]
    _print(("families", "slice", "plan", "layers"), rows)


def axes(model: Model, program: Program) -> list[str]:
    """The axes for which the model has a plan that the program supports."""
    return [axis for axis, plan in PLANS.items() if _is_supported(model, program, plan)]


def _cells() -> Iterator[tuple[str, ...]]:
    models = {model.family: model for model in map(read_model, reversed(catalog()))}
    rows: list[tuple[str, Model]] = []
    for family, name in FAMILY_NAMES.items():
        if family not in models:  # read from a config.json alone
            continue
        rows.append((name, models[family]))
        if family in VARIANTS:
            variant, model_id = VARIANTS[family]
            rows.append((variant, read_model(model_id)))
    for name, model in rows:
        supported = [" ".join(axes(model, program)) for program in PROGRAMS.values()]
        yield (name, *(text or "none" for text in supported))


def _is_supported(model: Model, program: Program, plan: str) -> bool:
    try:
        experiment = experiment_of(
            model=model,
            plan=parse_plan(plan),
            topology=parse_topology("v6e-8"),
            workload=Workload(batch=8, prompt=1024),
            program=program,
        )
        return program.frontend is Frontend.JAX or _is_traceable(experiment)
    except MeshscopeError:
        return False


def _is_traceable(experiment: Experiment) -> bool:
    """Whether TorchXLA has rules for the family, and one program for all stages; MeshscopeError if not."""
    check_traceable(experiment)
    return True


def _compilers_of(chip: str) -> list[str]:
    """JAX and libtpu of the programs of this chip among the golden files."""
    versions = {
        match["jax"]
        for path in GOLDEN_HLO.iterdir()
        if (match := re.fullmatch(rf"(?:\dx)?{chip}_.*\.jax-(?P<jax>[\d.]+)\.txt\.gz", path.name))
    }
    return [f"JAX {jax} with libtpu {_libtpu_of(jax)}" for jax in sorted(versions)]


def _libtpu_of(jax: str) -> str:
    """The libtpu that constraints.txt pins together with this JAX."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"jax=={jax};"))
    marker = line.partition(";")[2]
    (pinned,) = (x for x in lines if x.startswith("libtpu==") and x.endswith(marker))
    return pinned.removeprefix("libtpu==").partition(";")[0]


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for consecutive rows that differ only in their first cell."""
    return [
        (", ".join(row[0] for row in group), *cells)
        for cells, group in groupby(rows, key=lambda row: row[1:])
    ]


def _print(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [head, ["---"] * len(head), *rows]
    sys.stdout.write("".join(f"| {' | '.join(line)} |\n" for line in lines))
