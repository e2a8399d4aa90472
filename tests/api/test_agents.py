"""Tools of agents: the commands with their options, confined to a folder; and the skill."""

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import table

import meshscope
from meshscope.api import agents
from meshscope.api.agents import SKILL_FOLDERS, TOOLS, Toolbox, server_of
from meshscope.cli import app
from meshscope.errors import RunError

QWEN = {"model": "Qwen/Qwen3-32B", "topology": "v6e-8"}


def toolbox(folder: Path, *, write: bool = False) -> Toolbox:
    work, scratch = folder / "work", folder / "scratch"
    for one in (work, scratch):
        one.mkdir(exist_ok=True)
    return Toolbox(folder=work.resolve(), scratch=scratch.resolve(), may_write=write)


def client_of(server: Any) -> Any:
    from mcp import Client  # noqa: PLC0415  as slow to import as the other tests of this file together

    return Client(server)


def asked(tools: Toolbox, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """The results of the calls through a client."""

    async def session() -> list[Any]:
        async with client_of(server_of(tools)) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(session())


def test_a_client_finds_the_slice_for_a_load_and_why(tmp_path: Path) -> None:
    """Which slice for this model at this load, and why: through the protocol alone."""
    slices = ["v5e-8", "v6e-4", "v6e-8"]
    limits = {"slo": "ttft=2,tpot=0.05", "prices": "v5e=1.2,v6e=2.7"}
    prompt = {"prompt": 1024, "output": 256}
    (planned,) = asked(
        toolbox(tmp_path),
        ("plan", {"model": QWEN["model"], "topology": ",".join(slices), **limits, **prompt}),
    )
    plan = planned.structured_content
    winner = plan["winner"]
    assert plan["topology"] in {"v5e:2x4", "v6e:2x2", "v6e:2x4"}
    assert plan["why"]
    arguments = {
        **QWEN,
        "topology": plan["topology"],
        "plan": winner["plan"],
        "rate": 1.0,
        **prompt,
    }
    (served,) = asked(toolbox(tmp_path), ("serve_sim", {**arguments, "slo": limits["slo"]}))
    assert served.structured_content["is_stable"]
    assert "stable" in served.content[0].text


def test_an_answer_is_the_text_and_the_document_of_the_command(tmp_path: Path) -> None:
    arguments = {**QWEN, "plan": "tp=8"}
    tools = toolbox(tmp_path)
    short, rows = asked(
        tools, ("predict", arguments), ("predict", {**arguments, "keys": ["collectives", "time"]})
    )
    run = meshscope.predict(**arguments)
    document = json.loads(json.dumps(run.as_dict()))
    assert "TTFT, prefill" in short.content[0].text
    assert short.structured_content["memory"] == document["memory"]
    assert short.structured_content["time"]["tpot_s"] == document["time"]["tpot_s"]
    left_out = short.structured_content["left_out"]
    assert {"collectives", "time.steps.prefill.parts"} <= set(left_out)
    assert rows.structured_content["collectives"] == document["collectives"]
    assert rows.structured_content["time"] == document["time"]


def test_a_list_of_runs_keeps_the_figures_of_each(tmp_path: Path, monkeypatch: Any) -> None:
    tools = toolbox(tmp_path, write=True)
    monkeypatch.chdir(tools.folder)
    plans = {"a": "tp=8", "b": "tp=8,sp"}
    calls = [("predict", {**QWEN, "plan": plan, "out": name}) for name, plan in plans.items()]
    *_, ranked = asked(tools, *calls, ("show", {"runs": list(plans)}))
    document = ranked.structured_content
    assert document["left_out"] == ["runs.time.steps"]
    assert {one["run"] for one in document["runs"]} == set(plans)
    assert all(one["time"]["tpot_s"] > 0 and one["fit"] for one in document["runs"])


def test_a_program_in_the_folder_is_linted(tmp_path: Path, monkeypatch: Any) -> None:
    tools = toolbox(tmp_path)
    monkeypatch.chdir(tools.folder)
    golden = Path(__file__).parents[1] / "golden/hlo/v6e_tp8_decode_unroll.jax-0.12.0.1.txt.gz"
    (tools.folder / golden.name).write_bytes(golden.read_bytes())
    (result,) = asked(tools, ("lint", {"program": golden.name, "mesh": "tp=8"}))
    assert result.structured_content["n_certain"] == 0
    assert "values not followed" in " ".join(result.content[0].text.split())


def test_an_answer_follows_its_files_and_other_keys_its_answer(
    tmp_path: Path, monkeypatch: Any
) -> None:
    tools = toolbox(tmp_path, write=True)
    monkeypatch.chdir(tools.folder)
    run = {**QWEN, "plan": "tp=8", "out": "run", "force": True}
    show, rows = ("show", {"runs": ["run"]}), ("show", {"runs": ["run"], "keys": ["time"]})
    _, before, _, kept, after = asked(
        tools, ("predict", run), show, ("predict", {**run, "batch": 64}), rows, show
    )
    tpot = [one.structured_content["time"]["tpot_s"] for one in (before, kept, after)]
    assert tpot[0] == tpot[1] != tpot[2]


def test_tools_have_the_options_of_their_commands(tmp_path: Path) -> None:
    async def listed(tools: Toolbox) -> dict[str, Any]:
        async with client_of(server_of(tools)) as client:
            return {tool.name: tool for tool in (await client.list_tools()).tools}

    reading = asyncio.run(listed(toolbox(tmp_path)))
    writing = asyncio.run(listed(toolbox(tmp_path, write=True)))
    assert reading.keys() == TOOLS.keys()
    predict = reading["predict"].input_schema
    assert predict["required"] == ["model", "topology", "plan"]
    assert predict["properties"]["batch"]["type"] == "integer"
    assert predict["properties"]["partitioner"]["enum"] == ["manual", "auto"]
    assert "out" not in predict["properties"]
    assert "out" in writing["predict"].input_schema["properties"]
    assert reading["predict"].annotations.read_only_hint
    assert not writing["predict"].annotations.read_only_hint


@table
def test_a_bad_call_gets_one_message(
    tool: str, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tools = toolbox(tmp_path)
    (tools.folder / "link").symlink_to("/etc/passwd")
    (tools.folder / "inner").mkdir()
    (tools.folder / "inner" / "config.json").symlink_to("/etc/passwd")
    (result,) = asked(tools, (tool, arguments))
    assert result.is_error
    assert message in result.content[0].text
    assert "root:" not in result.content[0].text


def test_huge_arguments_are_refused(tmp_path: Path) -> None:
    values = ("Q" * 100_000, "../" * 100_000, {"a": [1]})
    calls = [("predict", {**QWEN, "plan": "tp=8", "model": value}) for value in values]
    calls += [("show", {"runs": [f"run{n}" for n in range(100_000)]})]
    calls += [("predict", {**QWEN, "plan": "tp=8", "batch": 10**400})]
    for result in asked(toolbox(tmp_path), *calls):
        assert result.is_error
        assert len(result.content[0].text) < 300


def test_runs_are_written_only_when_told(tmp_path: Path) -> None:
    arguments = {**QWEN, "plan": "tp=8", "out": "run"}
    (refused,) = asked(toolbox(tmp_path), ("predict", arguments))
    assert "--write" in refused.content[0].text
    tools = toolbox(tmp_path, write=True)
    arguments["out"] = str(tools.folder / "run")
    written, shown = asked(tools, ("predict", arguments), ("show", {"runs": [arguments["out"]]}))
    assert not written.is_error
    assert shown.structured_content["source"] == "predicted"


@pytest.mark.slow
def test_the_server_answers_over_standard_streams(tmp_path: Path) -> None:
    from mcp.client.stdio import StdioServerParameters  # noqa: PLC0415  as above

    words = ["-m", "meshscope", "mcp", "--folder", str(tmp_path)]
    source = {"PYTHONPATH": str(Path(meshscope.__file__).parents[1])}
    started = StdioServerParameters(command=sys.executable, args=words, env=source)

    async def session() -> Any:
        async with client_of(started) as client:
            return await client.call_tool("models", {"search": "Qwen3-32B"})

    result = asyncio.run(session())
    assert result.structured_content["result"][0]["id"] == "Qwen/Qwen3-32B"


def test_without_the_extra_the_message_names_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    with pytest.raises(meshscope.MeshscopeError, match=r"pip install 'meshscope\[mcp\]'"):
        agents.mcp(folder=tmp_path, write=False)
    with pytest.raises(RunError, match="not a folder"):
        agents.mcp(folder=tmp_path / "no", write=False)


def test_the_skill_is_written_where_agents_look(tmp_path: Path) -> None:
    shown = agents.skill_install(folder=tmp_path, force=False)
    assert len(shown.document["files"]) == 2  # what --json prints
    first, second = (tmp_path / name / "SKILL.md" for name in SKILL_FOLDERS)
    text = first.read_text(encoding="utf-8")
    assert text == second.read_text(encoding="utf-8")
    assert re.match(r"---\nname: meshscope\ndescription: .{100,1024}\n---\n", text)
    agents.skill_install(folder=tmp_path, force=False)  # the same again
    second.write_text("mine")
    with pytest.raises(RunError, match="--force"):
        agents.skill_install(folder=tmp_path, force=False)
    assert second.read_text() == "mine"
    agents.skill_install(folder=tmp_path, force=True)
    assert second.read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_the_recipes_that_need_no_compiler_run(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(agents.__file__).with_name("SKILL.md")).read_text(encoding="utf-8")
    lines = re.findall(r"^meshscope .*", text, re.MULTILINE)
    skipped = ("compile", "compare", "import", "check")  # they need libtpu, or files of the reader
    ran = [line for line in lines if line.split()[1] not in skipped]
    assert len(ran) >= 10
    for line in ran:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        app()(prog_name="meshscope", standalone_mode=False)
    out = capsys.readouterr().out
    assert out.count("TTFT") >= 4
