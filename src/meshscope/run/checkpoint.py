"""A checkpoint folder as Hugging Face writes it: config, safetensors (sharded or not), tokenizer.

Tensors are read one by one, when they are asked for; a file is mapped, never held.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshscope.errors import MissingToolError, SpecError
from meshscope.plan.experiment import Experiment
from meshscope.plan.weights import Dim, Weight, layer_weights, outer_weights

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_NAMES = 3  # of missing tensors in a message


class Checkpoint:
    """The tensors of a folder, by name; SpecError where one is missing or a file is damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _files_of(folder)
        self._opened: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        """The tensor as a numpy array, in the format in which it is stored."""
        if name not in self._files:
            raise SpecError(
                f"checkpoint '{self._folder}' has no tensor '{name}'. It belongs to another config, or "
                "is not whole."
            )
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = _opened(self._folder / file)
        try:
            return self._opened[file].get_tensor(name)
        except Exception as error:  # safetensors raises what it likes
            raise SpecError(
                f"checkpoint '{self._folder / file}' has no readable tensor '{name}' ({error}). "
                "Copy the file again."
            ) from error

    def check(self, experiment: Experiment) -> None:
        """SpecError when tensors of the model are missing."""
        missing = [name for name in tensor_names(experiment) if name not in self._files]
        if missing:
            some = ", ".join(f"'{name}'" for name in missing[:MAX_NAMES])
            more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
            raise SpecError(
                f"checkpoint '{self._folder}' lacks tensors of {experiment.model.name}: {some}{more}. "
                "It belongs to another config, or is not whole."
            )


def tensor_names(experiment: Experiment) -> Iterable[str]:
    """Names of all tensors that the model's weights are made of."""
    model, plan = experiment.model, experiment.plan
    for weight in outer_weights(model, plan):
        yield weight.checkpoint
    for index, layer in enumerate(model.layers):
        for weight in layer_weights(model, plan, layer):
            yield from _names(weight, index)


def _names(weight: Weight, layer: int) -> Iterable[str]:
    if "{expert}" not in weight.checkpoint:
        yield weight.checkpoint.format(layer=layer)
        return
    for expert in range(weight.shape[weight.dims.index(Dim.EXPERT)]):
        yield weight.checkpoint.format(layer=layer, expert=expert)


def _files_of(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    if (folder / INDEX).is_file():
        document = _read_json(folder / INDEX)
        files = document.get("weight_map")
        if not isinstance(files, dict):
            raise SpecError(f"'{folder / INDEX}' has no weight_map. Copy the checkpoint again.")
        missing = sorted(f for f in set(files.values()) if not (folder / f).is_file())
        if missing:
            raise SpecError(
                f"checkpoint '{folder}' lacks {len(missing)} of its {len(set(files.values()))} files, "
                f"such as '{missing[0]}'. Copy them, too."
            )
        return {str(name): str(file) for name, file in files.items()}
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_opened(folder / SINGLE).keys(), SINGLE)
    raise SpecError(
        f"'{folder}' holds no checkpoint: neither {SINGLE} nor {INDEX}. Give a folder as Hugging Face "
        "writes it."
    )


def _opened(path: Path) -> Any:
    try:
        from safetensors import safe_open  # noqa: PLC0415  only checkpoints need it
    except ImportError as error:
        raise MissingToolError(
            '--checkpoint needs safetensors. Install the extra: pip install "meshscope[checkpoint]".'
        ) from error
    try:
        return safe_open(str(path), framework="numpy")
    except Exception as error:  # safetensors raises what it likes
        raise SpecError(f"'{path}' is no safetensors file: {error}. Copy it again.") from error


class Texts:
    """The checkpoint's tokenizer; token ids end where the model ends a text."""

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415  only texts need it
        except ImportError as error:
            raise MissingToolError(
                '--prompt-text needs tokenizers. Install the extra: pip install "meshscope[checkpoint]".'
            ) from error
        path = folder / TOKENIZER
        if not path.is_file():
            raise SpecError(f"'{folder}' has no {TOKENIZER}. Copy it from the model's repository.")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises what it likes
            raise SpecError(f"'{path}' is no tokenizer: {error}. Copy it again.") from error
        self._ends = _ends(folder)

    def encoded(self, text: str) -> tuple[int, ...]:
        """Token ids of the text, with what the tokenizer puts around it."""
        ids = tuple(self._tokenizer.encode(text).ids)
        if not ids:
            raise SpecError("--prompt-text makes no token. Give some text.")
        return ids

    def decoded(self, ids: Sequence[int]) -> str:
        """The text of these token ids, up to the first that ends a text."""
        end = next((i for i, token in enumerate(ids) if token in self._ends), len(ids))
        return str(self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False))


def _ends(folder: Path) -> frozenset[int]:
    """Tokens that end a text, by generation_config.json or else config.json."""
    for name in (GENERATION, CONFIG):
        path = folder / name
        found = _read_json(path).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"'{path}' is not readable JSON: {error}. Copy it again.") from error
    if not isinstance(document, dict):
        raise SpecError(f"'{path}' must hold a JSON object. Copy it again.")
    return document
