"""The interpreter that torch_xla runs in."""

import pytest

from meshscope.errors import MissingToolError
from meshscope.programs import environments

FITTING = {
    "python": "3.11.2",
    "torch": "2.9.0",
    "torch_xla": "2.9.0",
    "transformers": "5.1.0",
    "jax": "0.10.2",
    "libtpu": "0.0.42.1",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_xla": None}, r"needs torch_xla, not installed for .*MESHSCOPE_TORCHXLA_PYTHON"),
        ({"torch": "2.13.0+cpu"}, r"torch 2\.13\.0\+cpu is not the one.*Install torch==2\.9\.\*"),
        ({"transformers": "4.57.1"}, r"transformers 4\.57\.1 .*pip install"),
    ],
)
def test_what_does_not_fit_is_told(changes, message, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {name: v for name, v in (FITTING | changes).items() if v is not None}
    monkeypatch.setattr(environments, "installed_versions", lambda *_: versions)
    with pytest.raises(MissingToolError, match=message):
        environments.check_torchxla()


def test_what_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "installed_versions", lambda *_: FITTING)
    assert environments.check_torchxla() == FITTING


def test_a_python_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environments.TORCHXLA_VARIABLE, "/no/such/python")
    with pytest.raises(MissingToolError, match=r"'/no/such/python', does not run.*unset it"):
        environments.check_torchxla()
