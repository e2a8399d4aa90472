"""Reads a Hugging Face checkpoint folder: config, safetensors (sharded or not), tokenizer.

Tensors are read one at a time from mapped files.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshscope.errors import MissingToolError, SpecError
from meshscope.files import read_object
from meshscope.plans.experiment import Experiment
from meshscope.plans.weights import reshaped, tensors_of
from meshscope.units import counted

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Prefixes of text tensors in multimodal checkpoints, and in text-only ones. Sources: the checkpoints of
# Gemma 3, Llama 4 and Mistral 3, and the output of transformers 5.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
# A tensor of one expert; Qwen3.5 checkpoints stack the experts of a layer, [E, 2F, D] and [E, D, F].
OF_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<role>gate|up|down)_proj\.weight"
)
COPY_AGAIN = "Copy it again."
MAX_NAMES = 3  # of missing or misshapen tensors in a message


class Checkpoint:
    """The tensors of a folder by name; SpecError if one is missing or a file is damaged.

    Tensors of the text part of a multimodal checkpoint have the names of a checkpoint with this part alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = _files_of(folder)
        self._stored = {_text_name(name): name for name in files} | {name: name for name in files}
        self._files = {name: files[stored] for name, stored in self._stored.items()}
        self._opened: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        """The tensor as a NumPy array, in its stored dtype."""

        def values(file: Any, stored: str, index: int | None, role: str) -> Any:
            if index is None:
                return file.get_tensor(stored)
            tensor = file.get_slice(stored)
            if role == "down":
                return tensor[index]
            half = tensor.get_shape()[1] // 2  # rows of the gate, before the rows of up
            return tensor[index, :half] if role == "gate" else tensor[index, half:]

        return self._of_tensor(name, values)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor, from the header of its file."""

        def shape(file: Any, stored: str, index: int | None, role: str) -> tuple[int, ...]:
            whole = tuple(file.get_slice(stored).get_shape())
            if index is None:
                return whole
            return whole[1:] if role == "down" else (whole[1] // 2, *whole[2:])

        return self._of_tensor(name, shape)

    def check(self, experiment: Experiment) -> None:
        """SpecError if tensors of the model are missing or misshapen; reads only headers."""
        model = experiment.model
        tensors = list(tensors_of(model, experiment.plan))
        missing = [f"'{n}'" for n, _ in tensors if self._place(n)[0] not in self._files]
        if missing:
            raise SpecError(
                f"checkpoint '{self._folder}' lacks tensors of {model.name}: {_some(missing, ', ')}. "
                "It belongs to another config or is incomplete."
            )
        misshapen: list[str] = []
        for name, weight in tensors:
            try:
                reshaped(weight, self.shape(name), name)
            except SpecError as error:
                misshapen.append(str(error))
        if misshapen:
            raise SpecError(f"checkpoint '{self._folder}': {_some(misshapen, ' ')}")

    def _place(self, name: str) -> tuple[str, int | None, str]:
        """The tensor that holds this one, and if it holds all experts, the index and role of this one."""
        match = OF_EXPERT.fullmatch(name)
        if match is None or name in self._files:
            return name, None, ""
        whole = f"{match['experts']}.{'down' if match['role'] == 'down' else 'gate_up'}_proj"
        is_whole = whole in self._files
        return (whole, int(match["index"]), match["role"]) if is_whole else (name, None, "")

    def _of_tensor(self, name: str, read: Callable[[Any, str, int | None, str], Any]) -> Any:
        stored, index, role = self._place(name)
        if stored not in self._files:
            raise SpecError(
                f"checkpoint '{self._folder}' has no tensor '{name}'. It belongs to another config or "
                "is incomplete."
            )
        file = self._files[stored]
        try:
            if file not in self._opened:
                self._opened[file] = _opened(self._folder / file)
            return read(self._opened[file], self._stored[stored], index, role)
        except Exception as error:  # safetensors raises undocumented types
            raise SpecError(
                f"checkpoint '{self._folder / file}' has no readable tensor '{name}' ({error}). "
                "Copy the file again."
            ) from error


def _text_name(name: str) -> str:
    """The name of a tensor in a checkpoint of the text part alone."""
    prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
    return TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def _some(faults: Sequence[str], between: str) -> str:
    more = f" and {len(faults) - MAX_NAMES} more" if len(faults) > MAX_NAMES else ""
    return between.join(faults[:MAX_NAMES]) + more


def _files_of(folder: Path) -> dict[str, str]:
    if (folder / INDEX).is_file():
        document = read_object(folder / INDEX, COPY_AGAIN, kind=SpecError)
        files = document.get("weight_map")
        if not isinstance(files, dict):
            raise SpecError(f"'{folder / INDEX}' has no weight_map. Copy the checkpoint again.")
        missing = sorted(f for f in set(files.values()) if not (folder / f).is_file())
        if missing:
            raise SpecError(
                f"checkpoint '{folder}' lacks {len(missing)} of its {counted(len(set(files.values())), 'file')}, "
                f"such as '{missing[0]}'. Copy them as well."
            )
        return {str(name): str(file) for name, file in files.items()}
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_opened(folder / SINGLE).keys(), SINGLE)
    raise SpecError(
        f"'{folder}' contains neither {SINGLE} nor {INDEX}. Give the folder of a Hugging Face "
        "checkpoint."
    )


def _opened(path: Path) -> Any:
    try:
        from safetensors import safe_open  # noqa: PLC0415  only checkpoints need it
    except ImportError as error:
        needed = "--checkpoint needs safetensors"
        raise MissingToolError.of_extra(needed, "checkpoint") from error
    try:
        return safe_open(str(path), framework="numpy")
    except Exception as error:  # safetensors raises undocumented types
        raise SpecError(f"'{path}' is not a safetensors file: {error}. Copy it again.") from error


class CheckpointText:
    """The tokenizer of the checkpoint; decoding stops at the first end-of-text token."""

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415  only texts need it
        except ImportError as error:
            needed = "--prompt-text needs tokenizers"
            raise MissingToolError.of_extra(needed, "checkpoint") from error
        path = folder / TOKENIZER
        if not path.is_file():
            raise SpecError(f"'{folder}' has no {TOKENIZER}. Copy it from the model's repository.")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises undocumented types
            raise SpecError(f"'{path}' is not a tokenizer: {error}. Copy it again.") from error
        self._ends = frozenset[int]()
        for name in (GENERATION, CONFIG):
            document = (
                read_object(folder / name, COPY_AGAIN, kind=SpecError)
                if (folder / name).is_file()
                else {}
            )
            if (ids := document.get("eos_token_id")) is not None:
                self._ends = frozenset(ids if isinstance(ids, list) else [ids])
                break

    def encoded(self, text: str) -> tuple[int, ...]:
        """Token ids of the text, with the special tokens of the tokenizer."""
        ids = tuple(self._tokenizer.encode(text).ids)
        if not ids:
            raise SpecError("--prompt-text is empty. Give at least one token of text.")
        return ids

    def decoded(self, ids: Sequence[int]) -> str:
        """The text of these token ids, up to the first end-of-text token."""
        end = next((i for i, token in enumerate(ids) if token in self._ends), len(ids))
        return str(self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False))
