"""A small model, and eight virtual CPU devices requested before JAX is imported."""

import json
import os
from pathlib import Path

import pytest
from made import TINY, UNOPTIMIZED

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {UNOPTIMIZED}"


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of a small model."""
    path = tmp_path_factory.mktemp("small") / "small.json"
    path.write_text(json.dumps(TINY))
    return path
