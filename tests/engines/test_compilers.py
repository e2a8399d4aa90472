"""Other versions of JAX and libtpu: installed whole or not at all, and compiled with in their own environment."""

import json
import stat
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import meshscope
from meshscope.api.environments import list_compilers
from meshscope.backends.compile.function import close_compilers
from meshscope.errors import MissingToolError, SpecError
from meshscope.programs.environments import (
    COMPILERS,
    LIBRARY_PATH,
    RECORD,
    TORCHXLA_VARIABLE,
    compiler_of,
    compiler_release,
    known_releases,
    torchxla_variables,
)

NAME = "jax-0.9.2"


@pytest.mark.slow
def test_a_compiler_is_listed_and_used(fake_python, cache, tmp_path) -> None:
    release = compiler_release(NAME)
    folder = release.install(python=str(fake_python()), report=lambda _: None)
    assert folder == cache / "compilers" / NAME
    asked = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    (pip,) = (arguments for arguments in asked if arguments[:2] == ["pip", "install"])
    assert pip[-4:] == ["jax==0.9.2", "jaxlib==0.9.2", "libtpu==0.0.37", "absl-py"]
    (listed,) = (entry for entry in list_compilers() if entry["folder"] is not None)
    assert (listed["compiler"], listed["libtpu"]) == (NAME, "0.0.37")
    assert compiler_of(NAME).python == str(folder / "bin" / "python")


def test_what_is_missing_or_unknown_is_one_message() -> None:
    with pytest.raises(
        MissingToolError, match=rf"\(1.37 GB\).* meshscope compilers install {NAME}"
    ):
        compiler_of(NAME)
    with pytest.raises(SpecError, match=r"'jax-0\.9' is not a known compiler. Did you mean"):
        compiler_of("jax-0.9")


def test_a_compiler_takes_neither_engines_nor_gpus() -> None:
    name = own_name()
    with pytest.raises(SpecError, match="is not a TPU slice; compiler="):
        meshscope.compile("Qwen/Qwen3-4B", topology="h100:8", plan="tp=8", compiler=name)
    with pytest.raises(SpecError, match='programs of frontend="jax", and this is one of torchxla'):
        meshscope.compile(
            "Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", frontend="torchxla", compiler=name
        )


def test_the_names_are_those_of_jax_and_libtpus_are_distinct() -> None:
    pins = [release.pins for release in known_releases(COMPILERS)]
    assert len({pin["libtpu"] for pin in pins}) == len(pins)
    assert all(pin["jax"] == pin["jaxlib"] for pin in pins)
    assert [release.name for release in known_releases(COMPILERS)] == [
        f"jax-{pin['jax']}" for pin in pins
    ]


def own_name() -> str:
    """The compiler beside meshscope, by whose pins the tests are installed."""
    (name,) = (entry["compiler"] for entry in list_compilers() if entry["is_own"])
    return name


def traced() -> tuple[Any, ...]:
    """A function and its arguments; the fast tests of this file need no JAX."""
    jax = import_module("jax")
    split = jax.sharding.PartitionSpec

    def mlp(x: Any, w: Any) -> Any:
        return jax.shard_map(
            lambda rows, part: jax.lax.psum(rows @ part, "tp"),
            in_specs=(split(None, "tp"), split("tp")),
            out_specs=split(),
        )(x, w)

    return mlp, *[jax.ShapeDtypeStruct((256, 256), jax.numpy.bfloat16)] * 2


def compiled(**options: str) -> meshscope.Run:
    return meshscope.compile(*traced(), topology="v6e:2x2", mesh="tp=4", **options)


def test_an_interpreter_of_torch_xla_has_its_own_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_PATH, "libtpu.so")
    monkeypatch.setenv(TORCHXLA_VARIABLE, "/other/python")
    assert LIBRARY_PATH not in torchxla_variables()
    monkeypatch.delenv(TORCHXLA_VARIABLE)
    assert torchxla_variables()[LIBRARY_PATH] == "libtpu.so"


# An interpreter of an environment: this one, which writes down what it sees of its surroundings.
SPY = """#!{shell}
env > {seen}
exec {python} "$@"
"""


@pytest.fixture
def other(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The compiler NAME, installed, with this interpreter in its environment; where it writes."""
    home, seen = cache / "compilers" / NAME, tmp_path / "seen"
    (home / "bin").mkdir(parents=True)
    python = home / "bin" / "python"
    python.write_text(SPY.format(shell="/bin/sh", seen=seen, python=sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (home / RECORD).write_text(json.dumps({"name": NAME, "n_bytes": 1}), encoding="utf-8")
    # as JAX sets it once this process has loaded its libtpu
    monkeypatch.setenv("TPU_LIBRARY_PATH", import_module("libtpu").get_library_path())
    return seen


@pytest.mark.slow
@pytest.mark.tpu
def test_a_function_compiles_in_the_other_environment(other: Path) -> None:
    expected = compiled(compiler=own_name())
    run = compiled(compiler=NAME)
    close_compilers()
    variables = dict(line.partition("=")[::2] for line in other.read_text().splitlines())
    assert "TPU_LIBRARY_PATH" not in variables
    assert Path(variables["PYTHONPATH"]).name == "python"  # with meshscope alone
    assert run.record.rows == expected.record.rows  # the same source lines, too, through text
    assert run.record.rows[0].source_line.startswith(__file__)
    assert run.hlo != expected.hlo  # one program in the cache for each compiler


@pytest.mark.slow
@pytest.mark.tpu
def test_a_model_compiles_in_the_other_environment(other: Path, tmp_path: Path) -> None:
    run = meshscope.compile(
        "Qwen/Qwen3-0.6B",
        topology="v6e:2x2",
        plan="tp=4",
        prompt=16,
        layers=1,
        compiler=NAME,
        out=tmp_path / "run",
    )
    assert "TPU_LIBRARY_PATH" not in other.read_text()
    assert run.compare().verdict != "different"
    assert run.record.manifest.command[-4:-2] == ("--compiler", NAME)


@pytest.mark.slow
@pytest.mark.tpu
def test_flags_are_swept_under_the_other_compiler(other: Path) -> None:
    sweep = meshscope.flags(
        *traced(), flags=["--xla_no=1"], topology="v6e:2x2", mesh="tp=4", compiler=NAME
    )
    close_compilers()
    assert sweep.effects[0].refused is not None
    assert other.exists()
