"""Shows the devices of a described slice to code that asks JAX for the devices while it is traced."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
from jax._src.pallas.mosaic import tpu_info
from jax.extend import backend


@contextmanager
def target_devices(devices: Sequence[Any], platform: str) -> Generator[None]:
    """In the block, JAX names these devices, and arrays stay where they would be.

    Libraries choose their kernels by `jax.devices()`, `jax.default_backend()`, the default device of
    `jax.extend.backend` (tokamax), or what Pallas knows of the TPU (`pltpu.get_tpu_info()`).
    """
    listed = mock.Mock(side_effect=lambda *_args, **_kwargs: list(devices))
    answers = {
        "devices": listed,
        "local_devices": listed,
        "device_count": mock.Mock(return_value=len(devices)),
        "local_device_count": mock.Mock(return_value=len(devices)),
        "default_backend": mock.Mock(return_value="gpu" if platform == "cuda" else platform),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(jax, **answers))
        first = mock.Mock(return_value=devices[0])
        stack.enter_context(mock.patch.object(backend, "get_default_device", first))
        if platform == "tpu":
            stack.enter_context(_pallas_target(devices[0]))
        yield


@contextmanager
def _pallas_target(device: Any) -> Generator[None]:
    """Pallas describes this TPU; answers that it keeps are forgotten before and after."""
    answers = {"get_device_kind": device.device_kind, "get_num_device_cores": device.num_cores}
    # Not every version of JAX has both functions.
    known = {n: mock.Mock(return_value=v) for n, v in answers.items() if hasattr(tpu_info, n)}
    with mock.patch.multiple(tpu_info, **known) if known else ExitStack():
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    for value in list(vars(tpu_info).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()
