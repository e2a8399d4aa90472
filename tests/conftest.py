"""Two tiers of tests: fast ones, and those that compile, run programs or kill processes."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# In the order in which they run, after every fast test.
SLOW_FOLDERS = ("calibrate", "programs", "compile", "live", "torch_xla")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of a slow folder as slow, and runs the slow tests last."""

    def tier(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
            return 2 + SLOW_FOLDERS.index(folder)
        return int(item.get_closest_marker("slow") is not None)

    items.sort(key=tier)
