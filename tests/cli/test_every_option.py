"""Every option of every command changes what its command answers, is refused with the reason, or has a test elsewhere.

The options are those that the command line declares, so that one without a row here fails.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from meshscope.cli import COMMANDS, SETTINGS, typer_command

TESTS = Path(__file__).parents[1]
QWEN = ("Qwen/Qwen3-4B", "--topology", "v6e-8", "--plan", "tp=8", "--layers", "2")
EXPERTS = (
    "Qwen/Qwen3-30B-A3B",
    "--topology",
    "v6e-8",
    "--plan",
    "dp=8,ep=8",
    "--batch",
    "64",
    "--layers",
    "2",
)
PIPELINE = ("Qwen/Qwen3-4B", "--topology", "v6e-8", "--plan", "pp=2,tp=4", "--batch", "8")
CONTEXT = (
    "Qwen/Qwen3-4B",
    "--topology",
    "v6e-8",
    "--plan",
    "cp=2,tp=4",
    "--prompt",
    "512",
    "--layers",
    "2",
)
SERVE = (
    "Qwen/Qwen3-4B",
    "--topology",
    "v6e-8",
    "--plan",
    "tp=8",
    "--layers",
    "2",
    "--rate",
    "50",
    "--requests",
    "60",
)
SEARCH = ("Qwen/Qwen3-4B", "--topology", "v6e-8", "--layers", "2")

# What each option of a command is added to, and its words. The answer differs from the one without.
CHANGES: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "predict": {
        "--topology": (QWEN, ("--topology", "v5e-8")),
        "--plan": (QWEN, ("--plan", "tp=8,sp")),
        "--batch": (QWEN, ("--batch", "8")),
        "--prompt": (QWEN, ("--prompt", "256")),
        "--output": (QWEN, ("--output", "64")),
        "--dtype": (QWEN, ("--dtype", "f32")),
        "--weight-dtype": (QWEN, ("--weight-dtype", "int8")),
        "--cache-dtype": (QWEN, ("--cache-dtype", "int8")),
        "--layers": (QWEN, ("--layers", "1")),
        "--engine": (("Qwen/Qwen3-4B", "--topology", "v6e-8", "--plan", "tp=8"), ("--engine", "vllm")),
        "--partitioner": (QWEN, ("--partitioner", "auto")),
        "--frontend": (QWEN, ("--frontend", "torchxla")),
        "--context": (CONTEXT, ("--context", "ring")),
        "--kernels": (QWEN, ("--kernels", "off")),
        "--dispatch": (EXPERTS, ("--dispatch", "capacity")),
        "--capacity-factor": ((*EXPERTS, "--dispatch", "capacity"), ("--capacity-factor", "2")),
        "--microbatches": (PIPELINE, ("--microbatches", "4")),
        "--prefill-chunk": ((*QWEN, "--prompt", "2048"), ("--prefill-chunk", "512")),
        "--routing-skew": (EXPERTS, ("--routing-skew", "2")),
        "--device-order": (QWEN, ("--device-order", "0,2,4,6,1,3,5,7")),
        "--speculate": ((*QWEN[:-2],), ("--speculate", "draft:Qwen/Qwen3-0.6B,k=2,acceptance=0.8")),
        "--full": (QWEN, ("--full",)),
        "--json": (QWEN, ("--json",)),
    },
    "plan": {
        "--topology": (SEARCH, ("--topology", "v5e-8")),
        "--slo": (SEARCH, ("--slo", "tpot=0.001")),
        "--for": (SEARCH, ("--for", "latency")),
        "--batch": (SEARCH, ("--batch", "8")),
        "--prompt": (SEARCH, ("--prompt", "256")),
        "--output": (SEARCH, ("--output", "64")),
        "--dtype": (SEARCH, ("--dtype", "f32")),
        "--weight-dtype": (SEARCH, ("--weight-dtype", "bf16")),
        "--cache-dtype": (SEARCH, ("--cache-dtype", "bf16")),
        "--layers": (SEARCH, ("--layers", "1")),
        "--prefill-chunk": ((*SEARCH, "--prompt", "4096"), ("--prefill-chunk", "512")),
        "--fit": (SEARCH, ("--fit",)),
        "--top": (SEARCH, ("--top", "1")),
        "--launch": (SEARCH, ("--launch",)),
        "--json": (SEARCH, ("--json",)),
    },
    "serve-sim": {
        "--topology": (SERVE, ("--topology", "v5e-8")),
        "--plan": (SERVE, ("--plan", "dp=2,tp=4")),
        "--instances": (SERVE, ("--instances", "2")),
        "--apart": (SERVE, ("--apart", "1:1")),
        "--prefill-topology": ((*SERVE, "--apart", "1:1"), ("--prefill-topology", "v6e-4", "--prefill-plan", "tp=4")),
        "--prefill-plan": ((*SERVE, "--apart", "1:1"), ("--prefill-plan", "dp=2,tp=4")),
        "--rate": (SERVE, ("--rate", "20")),
        "--arrivals": (SERVE, ("--arrivals", "burst")),
        "--max-concurrency": (SERVE, ("--max-concurrency", "2")),
        "--requests": (SERVE, ("--requests", "90")),
        "--prompt": (SERVE, ("--prompt", "256")),
        "--output": (SERVE, ("--output", "64")),
        "--lengths": (SERVE, ("--lengths", "geometric")),
        "--slo": (SERVE, ("--slo", "ttft=0.5,tpot=0.03")),
        "--dtype": (SERVE, ("--dtype", "f32")),
        "--weight-dtype": (SERVE, ("--weight-dtype", "int8")),
        "--cache-dtype": (SERVE, ("--cache-dtype", "int8")),
        "--layers": (SERVE, ("--layers", "1")),
        "--max-sequences": (SERVE, ("--max-sequences", "1")),
        "--max-step-tokens": (SERVE, ("--max-step-tokens", "512")),
        "--separate-steps": (SERVE, ("--separate-steps",)),
        "--reserve-output": (SERVE, ("--reserve-output", "1")),
        "--prefix-hit": (SERVE, ("--prefix-hit", "0.5")),
        "--host-overhead": (SERVE, ("--host-overhead", "0.01")),
        "--memory-frac": (SERVE, ("--memory-frac", "0.5")),
        "--seed": (SERVE, ("--seed", "1")),
        "--full": (SERVE, ("--full",)),
        "--json": (SERVE, ("--json",)),
    },
    "show": {
        "--metrics": (("run",), ("--metrics",)),
        "--roofline": (("run",), ("--roofline",)),
        "--full": (("run",), ("--full",)),
        "--json": (("run",), ("--json",)),
    },
    "compare": {"--json": (("run", "other"), ("--json",))},
    "sql": {
        "--json": (("run", "select * from runs"), ("--json",)),
        "--csv": (("run", "select * from runs"), ("--csv",)),
        "--wide": (("run", "select * from runs"), ("--wide",)),
        "--rows": (("run", "select phase, kind from events"), ("--rows", "1")),
    },
    "models": {"--json": ((), ("--json",))},
    "topologies": {"--json": ((), ("--json",))},
    "engines list": {"--json": ((), ("--json",))},
    "compilers list": {"--json": ((), ("--json",))},
}  # fmt: skip

# An option that the command refuses as changing nothing, or without another one.
REFUSED: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "predict": {"--loop": ((*QWEN, "--loop", "scan"), "--loop scan changes nothing")},
    "compile": {"--routing-skew": ((*QWEN, "--routing-skew", "2"), "has no experts")},
    "run": {
        "--routing-skew": (
            (*QWEN[:1], "--topology", "cpu:8", "--plan", "tp=8", "--routing-skew", "2"),
            "has no experts",
        ),
        "--warmup": ((*QWEN, "--warmup", "0"), "--warmup"),
    },
    "show": {"--inserted": (("run", "--inserted"), "has no compiled program")},
    "flags": {"--flag": ((*QWEN, "--flag", "x"), "has no value")},
    "serve-sim": {"--transfer": ((*SERVE, "--transfer", "ici"), "--apart")},
    "plan": {
        "--out": ((*SEARCH, "--out", "x"), "--verify"),
        "--force": ((*SEARCH, "--force"), "--report or --plot"),
        "--queue": ((*SEARCH, "--queue", "ray"), "--verify"),
        "--address": ((*SEARCH, "--address", "a:1"), "--verify"),
    },
    "import": {
        "--jobs": (("x.txt", "--jobs", "2"), "need --each"),
        "--queue": (("x.txt", "--queue", "ray"), "need --each"),
        "--address": (("x.txt", "--address", "a:1"), "need --each"),
        "--retry-failed": (("x.txt", "--retry-failed"), "need --each"),
    },
}

# Options whose tests are in other files, which name them; a folder stands for its files.
_COMPILED = ("compile", "function", "programs", "live", "cli/test_compile.py", "api", "engines", "torch_xla", "cost", "published")  # fmt: skip
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "predict": ("cli", "store"),
    "plan": ("cli", "serving", "api"),
    "serve-sim": ("cli", "serving"),
    "compile": _COMPILED,
    "run": _COMPILED,
    "sweep": ("cli", "backends/sweep"),
    "import": ("cli", "traces", "hlo", "compile", "torch_xla"),
    "show": ("cli", "function", "calibrate"),
    "flags": ("function", "cli"),
    "check": ("function", "cli"),
    "report": ("cli", "reports"),
    "export": ("cli", "reports"),
    "calibrate": ("calibrate", "cli"),
    "contribute": ("api", "calibrate", "cli"),
    "tpu create": ("backends/sweep", "cli"),
    "tpu status": ("backends/sweep",),
    "tpu install": ("backends/sweep",),
    "tpu sweep": ("backends/sweep",),
    "tpu ssh": ("backends/sweep",),
    "tpu delete": ("backends/sweep",),
    "tpu manifest": ("backends/sweep", "cli"),
    "engines install": ("engines",),
    "engines remove": ("engines",),
    "compilers install": ("compile", "engines", "cli"),
    "compilers remove": ("compile", "engines", "cli"),
}


# Options that no test tries yet: their commands start an installation, a compiler or a cloud command.
UNTRIED = {
    ("compile", "--cycles"),
    ("flags", "--compiler"),
    ("check", "--compiler"),
    ("tpu sweep", "--retry-failed"),
    ("engines install", "--yes"),
    ("compilers install", "--yes"),
}


def declared() -> list[tuple[str, tuple[str, ...]]]:
    """Each command with the names of each of its options."""
    options_of: list[tuple[str, tuple[str, ...]]] = []
    for words, command in COMMANDS.items():
        app = typer.Typer(**SETTINGS, add_completion=False)
        app.command(words)(typer_command(command.load()))
        options = (p for p in typer.main.get_command(app).params if p.opts[0].startswith("--"))
        options_of += [(words, (*option.opts, *option.secondary_opts)) for option in options]
    return options_of


def texts(places: tuple[str, ...]) -> str:
    """The tests at these places."""
    files = [
        f for p in places for f in ([TESTS / p] if p.endswith(".py") else (TESTS / p).rglob("*.py"))
    ]
    return "\n".join(f.read_text() for f in files if f != Path(__file__))


@pytest.mark.parametrize(("command", "names"), declared(), ids="".join)
def test_every_option_has_a_test(command: str, names: tuple[str, ...]) -> None:
    name = names[0]
    if name in CHANGES.get(command, {}) or name in REFUSED.get(command, {}):
        return
    keyword = name.removeprefix("--").replace("-", "_")
    text = texts(ELSEWHERE[command])
    is_tried = any(n in text for n in names) or f"{keyword}=" in text
    assert is_tried or (command, name) in UNTRIED, "give the option a row or a test"


KEPT: dict[tuple[str, ...], Any] = {}  # outcomes without the option, which several options share


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs."""
    import meshscope  # noqa: PLC0415

    at = tmp_path_factory.mktemp("options")
    for name, plan in (("run", "tp=8"), ("other", "tp=8,sp")):
        meshscope.predict(QWEN[0], topology="v6e-8", plan=plan, layers=2, out=at / name)
    return at


def answer(out: str) -> Any:
    """The answer without the lines that only repeat the options: the figures of a document, or the text."""
    try:
        document = json.loads(out)
    except ValueError:
        return out
    return (
        {k: v for k, v in document.items() if k != "experiment"}
        if isinstance(document, dict)
        else document
    )


@pytest.mark.parametrize(
    ("command", "option"),
    [(command, option) for command, options in CHANGES.items() for option in options],
)
def test_an_option_changes_the_answer(
    meshscope, monkeypatch: pytest.MonkeyPatch, home: Path, command: str, option: str
) -> None:
    monkeypatch.chdir(home)
    asked, words = CHANGES[command][option]
    # Figures count, not the line that repeats the options.
    is_kept = command in {"predict", "plan", "serve-sim"}  # which change no file
    form = ("--json",) * is_kept
    if option in {"--json", "--full", "--launch", "--top", "--fit"}:
        form = ()
    line = (*command.split(), *asked, *form)
    without = (KEPT.get(line) if is_kept else None) or meshscope(*line)
    KEPT[line] = without
    changed = meshscope(*command.split(), *asked, *words, *form)
    assert (without.status, changed.status) == (0, 0), changed.err
    assert answer(changed.out) != answer(without.out)


@pytest.mark.parametrize(
    ("command", "option"),
    [(command, option) for command, options in REFUSED.items() for option in options],
)
def test_an_option_without_effect_is_refused(
    meshscope, monkeypatch: pytest.MonkeyPatch, home: Path, command: str, option: str
) -> None:
    monkeypatch.chdir(home)
    words, message = REFUSED[command][option]
    outcome = meshscope(command, *words)
    assert outcome.status in {1, 2}
    assert message in outcome.err
