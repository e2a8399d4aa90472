"""The examples of the page on a user's own program run."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "your-program.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.tpu
def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    for example in EXAMPLES:
        exec(compile(example, str(PAGE), "exec"), {})
    assert "all_reduce" in capsys.readouterr().out
