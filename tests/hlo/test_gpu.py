"""Programs that XLA's CUDA plugin compiled for GPUs: their collectives equal the plan's."""

from dataclasses import replace

import pytest
from asks import ASKS, GPU_DIR, ONE, asked

from meshscope.analysis.join import Verdict, compare
from meshscope.backends.compile.read import read_phase
from meshscope.cost.collectives import predict
from meshscope.cost.op_cost import kernel_work
from meshscope.cost.rates import rates_of
from meshscope.cost.steps import TimedStep
from meshscope.errors import SpecError
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Kind, Phase
from meshscope.hardware.chips import CHIPS
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend
from meshscope.programs.frontends import check_can_compile
from meshscope.readers.hlo.parse import read_hlo

FILES = [(name, phase) for name in ASKS for phase in REQUEST_PHASES]


def _read(name: str, phase: Phase) -> tuple[Experiment, list[Collective], TimedStep]:
    experiment = asked(name)
    return experiment, *read_phase(experiment, phase, GPU_DIR / f"{name}.{phase}.txt.gz")


@pytest.mark.parametrize(("name", "phase"), FILES)
def test_predicted_equals_compiled_and_the_schedule_takes_as_long_as_its_parts(
    name: str, phase: Phase
) -> None:
    experiment, rows, step = _read(name, phase)
    comparison = compare([row for row in predict(experiment) if row.phase is phase], rows)
    assert {match.verdict for match in comparison.matches} == {Verdict.EQUAL}
    assert not [row.axis_reason for row in rows if row.axis_reason]
    time = step.time
    assert time.compute_s + time.exposed_s + time.idle_s == pytest.approx(time.step.value_s)
    assert time.exposed_s > 0
    bases = {"roofline", "kernel_model", "interconnect_model"}  # GPUs have no cycles
    assert set(time.by_basis_s) <= bases


def test_opcodes_and_asynchrony_are_those_of_the_text() -> None:
    """A start whose done follows at once is synchronous; dispatch and combine have one array each."""
    _, rows, _ = _read("h100_tp8", Phase.PREFILL)
    assert {row.is_async for row in rows} == {True, False}
    assert {row.opcode for row in rows} == {"all-reduce", "all-gather"}
    _, rows, _ = _read("h100_ep8", Phase.PREFILL)
    exchanges = {(r.part, r.opcode, r.dtype) for r in rows if r.kind is Kind.ALL_TO_ALL}
    parts = ("moe.dispatch", "moe.combine")
    assert exchanges == {(part, "ragged-all-to-all", "bf16") for part in parts}


def test_xla_kernels_that_replace_the_library_are_the_algorithm() -> None:
    """Small all-reduces run an XLA kernel; large ones and gathers leave the choice to NCCL."""
    algorithms = {
        (phase, row.kind): row.algorithm
        for phase in REQUEST_PHASES
        for row in _read("h100_tp8", phase)[1]
    }
    assert algorithms == {
        (Phase.PREFILL, Kind.ALL_REDUCE): None,
        (Phase.PREFILL, Kind.ALL_GATHER): None,
        (Phase.DECODE, Kind.ALL_REDUCE): "TRITON_ONE_SHOT",
        (Phase.DECODE, Kind.ALL_GATHER): None,
    }


@pytest.mark.parametrize("phase", REQUEST_PHASES)
def test_one_gpu_communicates_nothing(phase: Phase) -> None:
    experiment, rows, step = _read("h200_one", phase)
    assert rows == [row for row in predict(experiment) if row.phase is phase] == []
    assert step.time.compute_s == pytest.approx(step.time.step.value_s)


def _written_bytes(name: str, *opcodes: str) -> list[int]:
    """Bytes of each array that a kernel of decode writes, but for updates of the cache in place."""
    return [
        array.n_bytes or 0
        for instruction in read_hlo(GPU_DIR / f"{name}.decode.txt.gz").entry.instructions
        if instruction.opcode in opcodes and "dynamic_update_slice" not in instruction.name
        for array in instruction.arrays
    ]


def test_decode_on_a_gpu_reads_each_weight_once_and_leaves_the_cache_as_it_is() -> None:
    """For one row, no kernel writes an array as large as the smallest matrix, that of a layer's keys.

    For several, only the update of one position writes one of the cache's size, 4 x 260 x 2 x 128.
    """
    written = _written_bytes("h200_one", "fusion", "custom-call", "copy", "dot")
    assert len(written) > 20
    assert max(written) < 4096 * 1024 * 2
    assert 4 * 260 * 2 * 128 * 2 not in _written_bytes("h200_tp4", "fusion", "copy")


def test_the_attention_of_a_prompt_is_cudnn_s_and_priced_by_its_shapes() -> None:
    """Scores of 32 heads and 256 positions, and as much again with the values; half is masked."""
    entry = read_hlo(GPU_DIR / "h200_one.prefill.txt.gz").entry
    kernels = [
        instruction
        for instruction in entry.instructions
        if instruction.custom_call_target == "__cudnn$fmhaSoftmax"
    ]
    assert len(kernels) == ONE["h200_one"]["layers"]
    rates = rates_of(CHIPS["h200"])
    n_flops = {kernel_work(entry, kernel, rates).flops for kernel in kernels}
    assert n_flops == {2 * (2 * 32 * 256 * 256 * 128) // 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "'h100:8' is not a TPU slice; compile needs one, .* import the HLO"),
        ({"frontend": Frontend.TORCHXLA}, "torch_xla programs compile only for TPUs"),
    ],
    ids=["gpu", "torch_xla"],
)
def test_compiling_for_a_gpu_is_refused(change: dict, message: str) -> None:
    experiment = asked("h100_tp8")
    with pytest.raises(SpecError, match=message):
        check_can_compile(replace(experiment, program=replace(experiment.program, **change)))
