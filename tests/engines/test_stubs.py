"""Empty modules stand for what an engine imports and never uses."""

import subprocess
import sys
from pathlib import Path

import meshscope

PROGRAM = """
from meshscope.programs.engines.stubs import install_stubs
install_stubs(["vllm", "json"], replaced=["wave"])
import json, wave
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm import envs
import vllm.logger
assert json.loads("[1]") == [1], "what is installed wins"
assert not hasattr(wave, "__file__"), "unless it is to be replaced"
class Config(VllmConfig[int]): pass
assert isinstance(Config(1, a=2), VllmConfig)
assert VllmConfig | None is VllmConfig
@VllmConfig("decorator")
def decorated(): return 7
assert decorated() == 7
assert get_pp_indices(12, 0, 1) == (0, 12)
assert envs.VLLM_TPU_BUCKET_PADDING_GAP == 0
vllm.logger.init_logger("x").info_once("nothing")
try:
    import vllmx
except ModuleNotFoundError:
    print("passed")
"""


def test_imports_work_and_known_values_are_those_of_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(meshscope.__file__).parents[1])},
    )
    assert (done.stdout, done.stderr) == ("passed\n", "")
