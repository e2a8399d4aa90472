"""Fast tests first: what compiles or runs programs comes last."""

import pytest

SLOW_FOLDERS = ("programs", "compile", "live")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the slow folders behind the others, and leaves the order otherwise."""

    def slowness(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return 1 + SLOW_FOLDERS.index(folder) if folder in SLOW_FOLDERS else 0

    items.sort(key=slowness)
