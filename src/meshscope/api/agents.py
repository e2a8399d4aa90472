"""`meshscope mcp` and `meshscope skill install`: the commands as tools of an agent, and as recipes that it reads."""

import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from functools import partial
from importlib import import_module
from inspect import isclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any, get_args, get_origin

from meshscope import __version__
from meshscope.api.console import Shown, Written, rendered
from meshscope.api.options import (
    FullOutput,
    JsonOutput,
    RunOutput,
    declared_fields,
    hints_of,
    option,
    other_names,
    request_of,
    requests_of,
)
from meshscope.errors import (
    IS_COMMAND_LINE,
    MeshscopeError,
    MissingToolError,
    RunError,
    SpecError,
    UsageError,
    kinds_of,
    nearest,
    with_keywords,
)
from meshscope.files import own_text

if TYPE_CHECKING:
    from collections.abc import Callable

# The tools by the modules of their commands; `serve_sim` is the command `serve-sim`.
TOOLS = {
    "predict": "predict",
    "plan": "plan",
    "compile": "compile",
    "serve_sim": "serve",
    "show": "show",
    "compare": "compare",
    "lint": "lint",
    "models": "catalog:models",
    "topologies": "catalog:topologies",
}
# Options that write files, or start programs elsewhere, and need --write.
WRITING = ("out", "force", "report")
MAX_WORD = 4096  # characters of one value
MAX_SHOWN = 4000  # characters of JSON under one key of an answer, unless the call names the key
LEAST_SHOWN = 500  # characters below which an item of a list, or an object, is left out whole
MAX_ITEMS = 40  # of an answer that is a list
N_KEPT = 8  # answers that a later call for other keys takes as they are
WIDTH = 100
INSTRUCTIONS = (
    "meshscope says what the collectives of LLM inference on TPU slices (and GPUs) are and cost. Ask plan "
    "for the best plan and slice, predict for one plan (under a second), compile for what the real TPU "
    "compiler makes of it (minutes, no TPU needed), serve_sim for a load. Times are modeled, with intervals; "
    "repeat them with their intervals. `keys` returns the parts of the document that an answer leaves out."
)
KEYS_HELP = "Keys of the document to return whole; by default those that are short."
SKILL = "SKILL.md"
SKILL_FOLDERS = (".agents/skills/meshscope", ".claude/skills/meshscope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of a server, whose paths stay inside `folder` or `scratch`."""

    folder: Path
    scratch: Path  # runs of a server that may not write
    may_write: bool
    _lock: Lock = field(default_factory=Lock)
    _kept: "OrderedDict[str, tuple[str, Any]]" = field(default_factory=OrderedDict)

    def schema(self, name: str) -> dict[str, Any]:
        """The JSON schema of the arguments of a tool: the options of its command."""
        declared = self._declared(name)
        properties = {one.name: _property(one, hint) for one, hint in declared.values()}
        return {
            "type": "object",
            "properties": properties | {"keys": {**_LIST, "description": KEYS_HELP}},
            "required": [one.name for one, _ in declared.values() if one.default is MISSING],
            "additionalProperties": False,
        }

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The text and the document of a call; MeshscopeError if it is refused."""
        if name not in TOOLS:
            raise SpecError(f"there is no tool '{name[:80]}'. {nearest(name[:80], TOOLS)}")
        options = dict(arguments)
        keys = options.pop("keys", None)
        keys = _words("keys", keys) if keys else []
        question = json.dumps([name, options], sort_keys=True)
        with self._lock:  # commands are written for one process each
            if not keys or question not in self._kept:  # files may have changed
                self._kept[question] = self._answer(name, options)
                while len(self._kept) > N_KEPT:
                    self._kept.popitem(last=False)
        text, document = self._kept[question]
        return text, _short(document, keys)

    def _answer(self, name: str, options: dict[str, Any]) -> tuple[str, Any]:
        work, declared = _command(name), self._declared(name)
        for key, value in options.items():
            if key not in declared:
                remedy = nearest(key[:80], declared)
                if key in WRITING:
                    remedy = "This server only reads; start it with --write."
                raise SpecError(f"{name} has no argument '{key[:80]}'. {remedy}")
            self._check(key, value)
        required = [one for one, (of, _) in declared.items() if of.default is MISSING]
        if missing := [one for one in required if one not in options]:
            raise SpecError(f"{name} needs {', '.join(missing)}.")
        values = {key: _as_paths(key, value, declared[key][1]) for key, value in options.items()}
        if name == "compile" and not self.may_write:
            values["out"] = self.scratch / f"run-{len(list(self.scratch.iterdir())) + 1}"
        IS_COMMAND_LINE.set(False)  # messages name arguments, not flags
        kinds = requests_of(work)
        names = {word: one for kind in kinds.values() for word, one in other_names(kind).items()}
        try:
            requests = {key: request_of(kind, values) for key, kind in kinds.items()}
            shown: Shown = work(**{key: getattr(one, key, one) for key, one in requests.items()})
            return rendered(shown.text, WIDTH), shown.document()
        except (MeshscopeError, UsageError) as error:
            hints = {key: kinds_of(hint) for key, (_, hint) in declared.items()}
            raise SpecError(with_keywords(str(error), hints, names)) from error

    def _declared(self, name: str) -> dict[str, tuple[Any, Any]]:
        shown = (FullOutput, JsonOutput, RunOutput)
        kinds = [k for k in requests_of(_command(name)).values() if k not in shown]
        hints = {key: hint for kind in kinds for key, hint in hints_of(kind).items()}
        return {
            one.name: (one, hints[one.name])
            for one in declared_fields(*kinds)
            if not one.metadata["option"].is_for_python
            and (self.may_write or one.name not in WRITING)
        }

    def _check(self, name: str, value: Any) -> None:
        """SpecError for a value that is too long, or that reaches out of the folder."""
        words = value if isinstance(value, list) else [value]
        if any(isinstance(word, dict | list) for word in words) or len(str(value)) > MAX_WORD:
            raise SpecError(
                f"{name}: a value of more than {MAX_WORD} characters, or nested. Shorten it."
            )
        for word in words:
            # A model may stand inside a value: draft:MODEL,k=4.
            for part in re.split(r"[,;=\s]|(?<!^.):", word) if isinstance(word, str) else ():
                if not self._is_inside(part):
                    raise SpecError(
                        f"{name}: '{word[:80]}' is outside the folder of this server, {self.folder}. "
                        "Copy it there, or start the server with another --folder."
                    )

    def _is_inside(self, part: str) -> bool:
        if part.startswith("~") or ".." in Path(part).parts or "\0" in part:
            return False
        try:
            paths = [self.folder / part]
            if any(mark in part for mark in "*?["):
                paths = list(self.folder.glob(part)) if not Path(part).is_absolute() else paths
            paths += [one for path in paths if path.is_dir() and part for one in path.iterdir()]
            roots = (self.folder, self.scratch)
            return all(any(one.resolve().is_relative_to(r) for r in roots) for one in paths)
        except (OSError, ValueError, RuntimeError):  # a name too long, a loop of links
            return False


def _command(name: str) -> "Callable[..., Any]":
    module, _, function = TOOLS[name].partition(":")
    return getattr(import_module(f"meshscope.api.{module}"), function or "command")


_LIST: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_TYPES = {bool: "boolean", int: "integer", float: "number"}


def _property(one: Any, hint: Any) -> dict[str, Any]:
    """The JSON schema of an option."""
    declared, kind = one.metadata["option"], kinds_of(hint)[0]
    how = "" if declared.metavar is None else f"{declared.metavar}: "
    schema: dict[str, Any] = {"type": _TYPES.get(kind, "string")}
    if get_origin(kind) is list:
        schema = dict(_LIST)
    elif isclass(kind) and issubclass(kind, StrEnum):
        schema["enum"] = [str(member) for member in kind]
    if one.default is not MISSING and one.default is not None:
        schema["default"] = one.default
    bounds = {"minimum": declared.least, "maximum": declared.most}
    schema |= {key: bound for key, bound in bounds.items() if bound is not None}
    return {**schema, "description": how + declared.help}


def _as_paths(name: str, value: Any, hint: Any) -> Any:
    """The value, with the paths of a list of paths; SpecError for anything else than a list of words for a list."""
    kind = kinds_of(hint)[0]
    if get_origin(kind) is not list:
        return value
    return [*map(Path, _words(name, value))] if Path in get_args(kind) else _words(name, value)


def _words(name: str, value: Any) -> list[str]:
    if not (isinstance(value, list) and value and all(isinstance(one, str) for one in value)):
        raise SpecError(f"{name}: {value!r:.80} must be a list of words, at least one.")
    return value


def _short(document: Any, keys: list[str]) -> dict[str, Any]:
    """The document as an object, without what is long and was not asked for, which `left_out` names."""
    if isinstance(document, list):
        cut = len(document) - MAX_ITEMS if "result" not in keys else 0
        rest = [f"{cut} of {len(document)} items; name keys=['result']"] if cut > 0 else []
        return {"result": document[:MAX_ITEMS] if rest else document, "left_out": rest}
    if unknown := [key for key in keys if key not in document]:
        known = ", ".join(document)
        raise SpecError(f"keys: {unknown[0][:80]!r} is no key of the document. Known: {known}.")
    if keys:
        return {key: document[key] for key in keys} | {"left_out": []}
    left: list[str] = []
    kept = {name: _cut(one, MAX_SHOWN, name, left) for name, one in document.items()}
    left = list(dict.fromkeys(left))
    return {name: one for name, one in kept.items() if name not in left} | {"left_out": left}


def _cut(value: Any, limit: int, name: str, left: list[str]) -> Any:
    """The value without parts of too many characters of JSON, whose names go to `left`."""
    n_left = len(left)
    if len(json.dumps(value)) <= limit:
        return value
    if isinstance(value, dict) and limit >= LEAST_SHOWN:
        cut = {key: _cut(one, limit // 2, f"{name}.{key}", left) for key, one in value.items()}
        if kept := {key: one for key, one in cut.items() if f"{name}.{key}" not in left}:
            return kept
    if isinstance(value, list) and limit // len(value) >= LEAST_SHOWN:
        cut = partial(_cut, limit=limit // len(value), name=name, left=left)
        items = [*map(cut, [*value, *value])][len(value) :]  # without what any item leaves out
        if len(json.dumps(items)) <= limit:
            return items
    left[n_left:] = [name]
    return None


def server_of(tools: Toolbox) -> Any:
    """The server of these tools, an `mcp.server.Server`; MissingToolError without the extra `mcp`."""
    try:
        import mcp_types as types
        from anyio import to_thread
        from mcp.server.lowlevel import Server
    except ImportError as error:
        needed = "`meshscope mcp` needs the official Python SDK of the Model Context Protocol"
        raise MissingToolError.of_extra(needed, "mcp") from error

    output = {"type": "object", "properties": {"left_out": _LIST}, "required": ["left_out"]}
    hints = types.ToolAnnotations(read_only_hint=not tools.may_write, open_world_hint=False)

    async def list_tools(_context: Any, _params: Any) -> Any:
        listed = [
            types.Tool(
                name=name,
                description=" ".join((_command(name).__doc__ or "").split()),
                input_schema=tools.schema(name),
                output_schema=output,
                annotations=hints,
            )
            for name in TOOLS
        ]
        return types.ListToolsResult(tools=listed)

    async def call_tool(_context: Any, params: Any) -> Any:
        said: list[types.ContentBlock]
        try:
            work = partial(tools.call, params.name, params.arguments or {})
            text, document = await to_thread.run_sync(work)
        except MeshscopeError as error:
            said = [types.TextContent(type="text", text=str(error))]
            return types.CallToolResult(content=said, is_error=True)
        said = [types.TextContent(type="text", text=text)]
        return types.CallToolResult(content=said, structured_content=document)

    return Server(
        "meshscope",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def mcp(
    *,
    folder: Path = option(
        "DIR: Models, profiles and runs that the tools may read.", default=Path()
    ),
    write: bool = option("Tools may also write runs and pages into this folder.", default=False),
) -> None:
    """Serve the commands as tools for agents, over MCP.

    Tools read files of one folder and no others, and write nothing unless told to. Needs the extra `mcp`.
    """
    if not folder.is_dir():
        raise RunError(f"'{folder}' is not a folder. Give an existing one with --folder.")
    with TemporaryDirectory(prefix="meshscope-mcp-") as scratch:
        tools = Toolbox(folder=folder.resolve(), scratch=Path(scratch).resolve(), may_write=write)
        server = server_of(tools)
        import anyio
        from mcp.server.stdio import stdio_server

        os.chdir(tools.folder)  # where the relative paths of calls start

        async def serve() -> None:
            async with stdio_server() as (incoming, outgoing):
                await server.run(incoming, outgoing, server.create_initialization_options())

        anyio.run(serve)


def skill_install(
    *,
    folder: Path = option(
        "DIR: Project whose agents learn it; your home folder for all projects.", default=Path()
    ),
    force: bool = option("Replace an earlier SKILL.md.", default=False),
) -> Written:
    """Write recipes where agents look for skills.

    Writes SKILL.md to .agents/skills/meshscope and .claude/skills/meshscope.
    """
    text = own_text(f"api/{SKILL}")
    if not folder.is_dir():
        raise RunError(f"'{folder}' is not a folder. Give an existing one with --folder.")
    files = [folder / name / SKILL for name in SKILL_FOLDERS]
    for file in files:
        if file.exists() and not force and file.read_text(encoding="utf-8") != text:
            raise RunError(f"'{file}' exists and differs. Use --force to replace it.")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return Written({"files": list(map(str, files))}, "\n".join(f"wrote {one}" for one in files))
