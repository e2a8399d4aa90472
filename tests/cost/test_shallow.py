"""A shallow program with repeated layers has the times of the program of all layers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from made_hlo import module_text, rows_in, timed_text

from meshscope.cost.row_times import deep_rows
from meshscope.cost.steps import TimedStep, timeline_table
from meshscope.errors import ParseError
from meshscope.events.collective import Collective
from meshscope.events.timeline import unfolded
from meshscope.hardware.topology import parse_topology
from meshscope.model.layers import Fold, ShallowLayers

ARRAY = f"f32[{1 << 20}]"
N_LAYERS = 40
SHALLOW = ShallowLayers(
    layers=(*range(7), N_LAYERS - 1), folds=(Fold(first=3, n_layers=4, times=9),)
)


def _work(name: str, operand: str, cycles: int, op_name: str) -> str:
    return (
        f'  %{name} = {ARRAY} negate(%{operand}), metadata={{op_name="{op_name}"}}, '
        f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}\n'
    )


def _reduced(name: str, operand: str, op_name: str) -> str:
    return (
        f"  %{name} = {ARRAY} all-reduce(%{operand}), channel_id=1, replica_groups={{{{0,1}}}}, "
        f'use_global_device_ids=true, to_apply=%add, metadata={{op_name="{op_name}"}}\n'
    )


def _layer(layer: int) -> str:
    """Work that depends on the layer's place among four, two all-reduces and a prefetch."""
    scope = f"prefill/layer{layer}"
    return (
        f"  %fetch{layer} = ({ARRAY}{{0:S(1)}}, {ARRAY}, u32[]) copy-start(%x)\n"
        + _work(f"attn{layer}", f"x{layer}", 900, f"{scope}/attn/dot")
        + _reduced(f"y{layer}", f"attn{layer}", f"{scope}/attn/psum")
        + f"  %fetched{layer} = {ARRAY}{{0:S(1)}} copy-done(%fetch{layer})\n"
        + _work(f"mlp{layer}", f"y{layer}", 5000 + 700 * (layer % 4), f"{scope}/mlp/dot")
        + _reduced(f"x{layer + 1}", f"mlp{layer}", f"{scope}/mlp/psum")
    )


def _relayout(layer: int) -> str:
    return _work(f"weights{layer}", "x", 300, rf"weights[\'layers\'][{layer}][\'wk\']")


def _gather(layer: int) -> str:
    return _reduced(f"gathered{layer}", "x", f"prefill/layer{layer}/attn/gather")


def _module(n_layers: int, before_layer: Callable[[int], str] = _relayout) -> str:
    """All layers, behind what the compiler moves out of each of them."""
    hoisted = "".join(before_layer(layer) for layer in range(n_layers))
    layers = "".join(_layer(layer) for layer in range(n_layers))
    first = _work("x0", "x", 2000, "prefill/embed/gather")
    last = _work("head", f"x{n_layers}", 3000, "prefill/lm_head/dot")
    return module_text(f"  %x = {ARRAY} parameter(0)\n{hoisted}{first}{layers}{last}")


def _timed(text: str, layers: ShallowLayers | None = None) -> tuple[TimedStep, list[Collective]]:
    step = timed_text(text, "v6e:1x2", "tp=2", layers=layers)
    rows = rows_in(text, "tp=2", crosses_slices=parse_topology("v6e:1x2").crosses_slices)
    return step, step.rows(rows)


@pytest.mark.parametrize("before_layer", [_relayout, _gather])
def test_the_step_is_that_of_all_layers(before_layer: Callable[[int], str]) -> None:
    whole, shallow = (
        _timed(_module(n, before_layer), layers)[0].time
        for n, layers in ((N_LAYERS, None), (len(SHALLOW.layers), SHALLOW))
    )
    for name in ("value_s", "low_s", "high_s"):
        assert getattr(shallow.step, name) == pytest.approx(getattr(whole.step, name)), name
    for name in ("compute_s", "exposed_s", "idle_s", "collective_s", "exposed_by_axis_s"):
        assert getattr(shallow, name) == pytest.approx(getattr(whole, name)), name
    costs = [{part.part: part.compute_s for part in step.parts} for step in (shallow, whole)]
    assert costs[0] == pytest.approx(costs[1])


def test_every_layer_has_its_rows_and_its_place_on_the_timeline() -> None:
    whole, expected = _timed(_module(N_LAYERS))
    shallow, rows = _timed(_module(len(SHALLOW.layers)), SHALLOW)
    untimed = [replace(row, start_s=None, dur_s=None, exposed_s=None) for row in expected]
    deep, _ = deep_rows(untimed, rows, shallow.simulated, SHALLOW)
    for name in ("start_s", "dur_s", "exposed_s"):
        seconds = [[getattr(row, name) for row in table] for table in (deep, expected)]
        assert seconds[0] == pytest.approx(seconds[1]), name
    spans = [
        unfolded(timeline_table([step])).filter(lane="collective") for step in (shallow, whole)
    ]
    assert spans[0]["start_s"].to_list() == pytest.approx(spans[1]["start_s"].to_list())


def test_a_collective_without_counterpart_has_no_time() -> None:
    shallow, rows = _timed(_module(len(SHALLOW.layers)), SHALLOW)
    other = replace(rows[0], dtype="bf16", dur_s=None)
    deep, _ = deep_rows([*rows, other], rows, shallow.simulated, SHALLOW)
    assert [row.dur_s is None for row in deep] == [False] * len(rows) + [True]


def test_a_program_without_layers_is_an_error() -> None:
    text = _module(len(SHALLOW.layers)).replace("prefill/layer", "prefill/block")
    with pytest.raises(ParseError, match="Use --loop scan or --loop unroll"):
        _timed(text.replace("layers", "blocks"), SHALLOW)
