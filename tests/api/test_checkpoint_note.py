"""A config that stores weights in another format than assumed is said so."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshscope.api.predict import predict
from meshscope.spec.model.catalog import CATALOG


def notes(folder: Path, config: dict[str, Any], **options: Any) -> tuple[str, ...]:
    path = folder / "config.json"
    path.write_text(json.dumps({**CATALOG["Qwen/Qwen3-4B"].config, **config}))
    return predict(path, topology="v6e-8", plan="tp=8", layers=1, **options).warnings


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 8}}
ODD = {"quantization_config": {"quant_method": "compressed-tensors"}}


@pytest.mark.parametrize(
    ("config", "end"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "as fp8; bf16 is assumed. Use --weight-dtype fp8 ",
        ),
        (
            FP8,
            "as fp8 with scales of 128 x 128 blocks; bf16 is assumed. Use --weight-dtype fp8_block128 for",
        ),
        (GPTQ, "as gptq of 8 bits; bf16 is assumed. Use --weight-dtype int8 for its bytes"),
        (ODD, "as compressed-tensors; bf16 is assumed, and no --weight-dtype is its equal"),
        ({"torch_dtype": "float32"}, "as float32; bf16 is assumed. Use --weight-dtype float32 for"),
    ],
)
def test_another_format_is_named_with_its_option(
    tmp_path: Path, config: dict[str, Any], end: str
) -> None:
    (note,) = notes(tmp_path, config)
    assert end in note


def test_no_note_where_nothing_differs(tmp_path: Path) -> None:
    assert notes(tmp_path, {"torch_dtype": "bfloat16"}) == ()
    assert notes(tmp_path, {"dtype": "float16"}) == ()
    assert notes(tmp_path, {"quantization_config": [1], "torch_dtype": 3}) == ()
    assert notes(tmp_path, FP8, weight_dtype="fp8") == ()
    assert notes(tmp_path, {"torch_dtype": "float32"}, dtype="f32") == ()
