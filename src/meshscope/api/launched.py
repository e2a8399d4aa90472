"""The option --from-command: words of the command line from the launch command of a server."""

import shlex
from collections.abc import Mapping
from typing import Any

from meshscope.api.console import note
from meshscope.api.options import option_words
from meshscope.reports.model import plain
from meshscope.serving.launched import read_launch, taken


def launched_words(command: Any, given: Mapping[str, Any]) -> list[str]:
    """The words for the options that are not given, noted on standard error with what is not simulated."""
    launched = read_launch(given["from_command"], given.get("model"))
    params = {param.name: param for param in command.params}
    options = taken(launched, params.keys() - given.keys())
    is_argument = params["model"].param_type_name == "argument"
    words = list(option_words(options, "model" if is_argument else ""))
    note(f"--from-command gives: {plain(shlex.join(words))}")
    if launched.not_simulated:
        note(f"not simulated: {plain(', '.join(launched.not_simulated))}")
    return words
