"""Names of kernels, of steps, and formats by content."""

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import pytest

from meshscope.errors import TraceError
from meshscope.events.enums import Kind
from meshscope.readers.traces.collectives import (
    is_named_like_communication,
    kernel_collective,
    kind_of,
)
from meshscope.readers.traces.servers import (
    StepKind,
    StepMark,
    distinct_steps,
    kind_of_tokens,
    read_annotation,
)
from meshscope.readers.traces.sniff import check_kind, format_of
from meshscope.readers.traces.trace import TraceFormat


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "group_size"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Kind.ALL_REDUCE, "bf16", None),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", Kind.ALL_REDUCE, "f32", None),
        ("ncclDevKernel_ReduceScatter_Sum_f16_RING_LL(x)", Kind.REDUCE_SCATTER, "f16", None),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16", Kind.ALL_REDUCE, "bf16", None),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", Kind.PERMUTE, None, None),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage)", None, None, None),
        ("void vllm::cross_device_reduce_2stage<c10::Half, 4>(vllm::RankData*)", Kind.ALL_REDUCE, "f16", 4),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)", Kind.ALL_REDUCE, "bf16", 8),
        ("multimem_all_reduce_kernel<c10::BFloat16>", Kind.ALL_REDUCE, "bf16", None),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>", Kind.ALL_REDUCE, None, None),
        ("mscclpp::allreduce_kernel", Kind.ALL_REDUCE, None, None),
        ("void deep_ep::internode_ll::dispatch<true>(void*)", Kind.ALL_TO_ALL, None, None),
        ("nvshmemi_transfer_rma", None, None, None),
        # NCCL and RCCL, old and new
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Kind.ALL_GATHER, None, None),
        ("ncclDevKernel_Broadcast_RING_LL(x)", Kind.BROADCAST, None, None),
        ("ncclDevKernel_Reduce_Sum_bf16_RING_LL(x)", Kind.REDUCE, "bf16", None),
        ("ncclKernel_Reduce_RING_LL_Sum_float(x)", Kind.REDUCE, "f32", None),
        ("ncclDevKernel_ReduceScatter_Sum_f8e4m3_RING_LL(x)", Kind.REDUCE_SCATTER, "f8e4m3fn", None),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", Kind.PERMUTE, None, None),
        ("ncclDevKernel_AlltoAllPivot_RING_SIMPLE_Sum_i8(x)", Kind.ALL_TO_ALL, None, None),
        ("ncclSymkDevKernel_ReduceScatter_LDMC_sum_bf16(x)", Kind.REDUCE_SCATTER, "bf16", None),
        ("ncclSymDevKernel_AllGather_STMC(x)", Kind.ALL_GATHER, None, None),
        ("rcclGenericKernel<7, 4>(x)", None, None, None),
        ("mscclKernel_Sum_half_LL(x)", None, "f16", None),
        # engines
        ("void vllm::cross_device_reduce_1stage_naive<c10::BFloat16, 4>(x)", Kind.ALL_REDUCE, "bf16", 4),
        ("void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<half>>(x)", Kind.ALL_REDUCE, "f16", None),
        ("void aiter::cross_device_reduce_2stage<__hip_bfloat16, 8>(x)", Kind.ALL_REDUCE, "bf16", 8),
        ("void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>(x)", Kind.REDUCE_SCATTER, "bf16", 8),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, 8>(x)", Kind.ALL_REDUCE, "bf16", 8),
        ("void tensorrt_llm::kernels::twoShotAllReduceKernel<half, 4>(x)", Kind.ALL_REDUCE, "f16", 4),
        ("void tensorrt_llm::kernels::lamport_style_one_shot_all_reduce_norm_kernel<__nv_bfloat16>(x)", Kind.ALL_REDUCE, "bf16", None),
        ("void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_twoshot_sync<x>", Kind.ALL_REDUCE, None, None),
        ("void tensorrt_llm::kernels::mnnvl::moeA2ADispatchKernel<x>(y)", Kind.ALL_TO_ALL, None, None),
        ("void tensorrt_llm::kernels::moeAllToAllKernel(x)", Kind.ALL_TO_ALL, None, None),
        ("void flashinfer::vllm::cross_device_reduce_2stage<half, 8>(x)", Kind.ALL_REDUCE, "f16", 8),
        ("two_shot_all_reduce_kernel_inplace<c10::BFloat16>", Kind.ALL_REDUCE, "bf16", None),
        ("one_shot_all_reduce_kernel<float, 16, 8>(x)", Kind.ALL_REDUCE, "f32", 8),
        ("multimem_one_shot_all_reduce_kernel<c10::BFloat16>", Kind.ALL_REDUCE, "bf16", None),
        ("multimem_all_gather_kernel<x>", Kind.ALL_GATHER, None, None),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(x)", Kind.ALL_TO_ALL, "bf16", 8),
        ("void deep_ep::intranode::notify_dispatch<8>(x)", None, None, None),
        ("void deep_ep::internode_ll::combine<true, 7168, 9, 9>(x)", Kind.ALL_TO_ALL, None, None),
        ("nvshmem::alltoall_kernel", Kind.ALL_TO_ALL, None, None),
        ("nvshmemi_barrier_all_kernel", None, None, None),
        ("void hybrid_ep::dispatch_kernel<8>(x)", Kind.ALL_TO_ALL, None, None),
        # ROCm: MoRI, mangled or not, and aiter
        ("EpDispatchIntraNodeKernel_bf16", Kind.ALL_TO_ALL, None, None),
        ("void mori::moe::EpCombineInterNodeV1Kernel<__hip_bfloat16>(int)", Kind.ALL_TO_ALL, "bf16", None),
        ("_ZN4mori3moe25EpDispatchIntraNodeKernelIfEEvNS0_21EpDispatchCombineArgsIT_EE", Kind.ALL_TO_ALL, None, None),
        ("mori::moe::EpDispatchCopyToStaging", Kind.ALL_TO_ALL, None, None),
        ("void aiter::allgather_vec<__hip_bfloat16, 8>(x)", Kind.ALL_GATHER, "bf16", None),
        ("void aiter::allreduce_fusion_kernel_1stage<__hip_bfloat16, 8>(x)", Kind.ALL_REDUCE, "bf16", None),
        ("ncclDevKernel_Broadcast_RING_LL_Sum_int8_t(x)", Kind.BROADCAST, "s8", None),
    ],
)  # fmt: skip
def test_kernels_that_communicate(name, kind, dtype, group_size) -> None:
    kernel = kernel_collective(name)
    assert (kernel.kind, kernel.dtype, kernel.group_size) == (kind, dtype, group_size)


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1>(x)",
        "nvjet_hsh_128x256",
        "broadcast_add_kernel",
        "void deep_ep::layout::get_dispatch_layout<256, 32>(x)",  # counts on its own device
    ],
)
def test_kernels_that_compute(name: str) -> None:
    assert kernel_collective(name) is None


@pytest.mark.parametrize(
    ("name", "is_alike"),
    [
        ("moe_token_dispatch_kernel", True),
        ("void mylib::ExpertCombineKernel<float>(x)", True),
        ("iris_persistent_all_gather_kernel", True),
        ("myAllReduceKernel", True),
        ("void x::reduce_scatter_ring<half>(y)", True),
        ("a2a_v2_kernel", True),
        ("all2all_sdma", True),
        ("pp_send_recv", True),
        ("oneccl::all_to_all::kernel", True),
        ("p2p_broadcast_kernel", True),
        ("rmsnorm_all_reduce_fused", True),
        ("ag_gemm_all_gather_fused", True),
        ("fused_moe_dispatch_kernel", True),
        ("triton_poi_fused_add_all_reduce_wait_tensor_0", False),  # the graph's ops around it
        # of the real traces of TraceLens and HTA, and of libraries
        ("_combined_routing_compute", False),
        ("_combined_routing_memset", False),
        ("_finalize_matmul_scatter_bf16", False),
        ("void at::native::_scatter_gather_elementwise_kernel<128, 4>(x)", False),
        ("void cub::DeviceReduceByKeyKernel<cub::DispatchReduceByKey<long*>::Policy>(x)", False),
        ("_ZN19cutlass_cudnn_train6KernelINS_17LinearCombinationIffEEEEvNT_6ParamsE", False),
        ("void flash::flash_fwd_splitkv_combine_kernel<x>(y)", False),
        ("void flash::FlashAttnFwdCombine<x>(y)", False),
        ("mla_decode_combine", False),
        ("void deep_ep::layout::get_dispatch_layout<256, 32>(x)", False),
        ("small_reduce_kernel", False),
        ("warpAllReduceSum", False),
        ("broadcast_add_kernel", False),
        ("loop_broadcast_fusion", False),
        ("void at::native::vectorized_gather_kernel<16, long>(x)", False),
    ],
)
def test_kernels_named_like_communication(name: str, *, is_alike: bool) -> None:
    assert kernel_collective(name) is None
    assert is_named_like_communication(name) is is_alike


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", Kind.ALL_REDUCE),
        ("_allgather_base", Kind.ALL_GATHER),
        ("all_gather_into_tensor_coalesced", Kind.ALL_GATHER),
        ("reduce_scatter_tensor_coalesced", Kind.REDUCE_SCATTER),
        ("nccl:all_to_all", Kind.ALL_TO_ALL),
        ("ALLTOALL_BASE", Kind.ALL_TO_ALL),
        ("send", Kind.SEND),
        ("reduce", Kind.REDUCE),
        ("nccl:scatter", Kind.SCATTER),
        ("reduce_kernel", None),
    ],
)
def test_names_of_collectives(name: str, kind: Kind | None) -> None:
    assert kind_of(name) is kind


@pytest.mark.parametrize(
    ("name", "kind", "tokens"),
    [
        ("execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489sqsq37sqsk34489)", StepKind.PREFILL, (8155, 37)),
        ("execute_context_2(4096)_generation_30(30)", StepKind.PREFILL, (4096, 30)),
        ("execute_context_0(0)_generation_64(64)", StepKind.DECODE, (0, 64)),
        ("execute_context_1(50)_generation_50(50)", StepKind.MIXED, (50, 50)),
        ("execute_new_2_cached_0", StepKind.PREFILL, (None, None)),
        ("execute_new_2_cached_9", StepKind.MIXED, (None, None)),
        ("execute_new_0_cached_9", None, (None, None)),
        ("step[DECODE bs=16]", StepKind.DECODE, (0, 16)),
        ("step[EXTEND bs=2 toks=4096]", StepKind.PREFILL, (4096, 0)),
        ("step[MIXED bs=2]", StepKind.MIXED, (None, None)),
        ("ProfilerStep#12", None, (None, None)),
        ("execute_model: 8 reqs, 8 toks", StepKind.DECODE, (0, 8)),
        ("execute_model: 3 reqs, 4103 toks", StepKind.PREFILL, (None, None)),
        ("execute_model: 60 reqs, 100 toks", StepKind.MIXED, (None, None)),
        ("execute_model: 0 reqs, 0 toks", None, (0, 0)),
        ("forward_batch_generation 17", None, (None, None)),
        ("forward_batch_generation_overlap 3", None, (None, None)),
    ],
)  # fmt: skip
def test_annotations_of_steps(name, kind, tokens) -> None:
    step = read_annotation(name)
    assert (step.kind, (step.prefill_tokens, step.decode_tokens)) == (kind, tokens)


VLLM = "execute_0_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)"
SGLANG = "step[DECODE bs=32]"


@pytest.mark.parametrize(
    ("marks", "steps"),
    [
        # two conventions of SGLang (TraceLens issues 723 to 733), in both orders
        ([(VLLM, 0, 1000, 1), (SGLANG, 100, 800, 1)], [(VLLM, 0, 1000)]),
        ([(SGLANG, 0, 1000, 1), (VLLM, 100, 800, 1)], [(VLLM, 0, 1000)]),
        # three levels, and the profiler's steps around one and around several
        (
            [("ProfilerStep#1", 0, 1000, 1), (VLLM, 100, 800, 1), (SGLANG, 200, 500, 1)],
            [(VLLM, 0, 1000)],
        ),
        (
            [("ProfilerStep#1", 0, 1000, 1), (VLLM, 100, 300, 1), (SGLANG, 150, 99, 1), (VLLM, 500, 300, 1)],
            [(VLLM, 100, 300), (VLLM, 500, 300)],
        ),
        ([("ProfilerStep#1", 0, 100, 1), ("ProfilerStep#2", 100, 100, 1)], [("ProfilerStep#1", 0, 100), ("ProfilerStep#2", 100, 100)]),
        # boundaries of the profiler inside of steps
        ([("ProfilerStep#1", 0, 1000, 1), (SGLANG, 900, 400, 1)], [(SGLANG, 900, 400)]),
        # one tells the tokens, what is inside of it does not
        ([(SGLANG, 0, 1000, 1), ("step[TARGET_VERIFY]", 0, 400, 1), ("step[DRAFT_EXTEND]", 500, 400, 1)], [(SGLANG, 0, 1000)]),
        # another thread, with another convention or the same
        ([(VLLM, 0, 1000, 1), (SGLANG, 100, 800, 2)], [(VLLM, 0, 1000)]),
        ([(SGLANG, 0, 1000, 1), (SGLANG, 100, 800, 2)], [(SGLANG, 0, 1000), (SGLANG, 100, 800)]),
        # ends and starts differ by rounding; steps that follow each other overlap by as much
        ([(SGLANG, 0, 1_000_500, 1), (VLLM, 1000, 1_000_000, 1)], [(VLLM, 0, 1_001_000)]),
        (
            [(VLLM, 0, 1_000_500, 1), (VLLM, 1_000_000, 1_000_000, 1)],
            [(VLLM, 0, 1_000_500), (VLLM, 1_000_000, 1_000_000)],
        ),
        # the profiler repeats annotations on each stream of a GPU
        (
            [(SGLANG, 0, 100, None), (SGLANG, 10, 95, None), (SGLANG, 100, 100, None), (SGLANG, 110, 95, None)],
            [(SGLANG, 0, 105), (SGLANG, 100, 105)],
        ),
    ],
)  # fmt: skip
def test_annotations_that_contain_each_other_mark_one_step(marks, steps) -> None:
    distinct = distinct_steps([StepMark(*mark) for mark in marks])
    assert [(mark.name, mark.start_ns, mark.dur_ns) for mark in distinct] == steps


@pytest.mark.parametrize("name", ["aten::mm", "execute_model", "nccl:all_reduce", "step"])
def test_other_annotations_are_no_steps(name: str) -> None:
    assert read_annotation(name) is None


def test_thresholds_of_phases() -> None:
    """At least 0.9 of the tokens: prefill; at most 0.2: decode."""
    shares = {(90, 10): "prefill", (89, 11): "mixed", (21, 79): "mixed", (20, 80): "decode"}
    assert {tokens: kind_of_tokens(*tokens) for tokens in shares} == shares
    assert kind_of_tokens(0, 0) is None


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"schemaVersion": 1, "traceEvents": []}', TraceFormat.KINETO),
        (b'[{"ph": "X", "cat": "kernel"}]', TraceFormat.KINETO),
        (b'{"displayTimeUnit":"ns","metadata":{"highres-ticks":true},"traceEvents":[]}', TraceFormat.CHROME_TPU),
        (b'{"traceEvents":[{"ph":"M","args":{"name":"/device:GPU:0"}}]}', TraceFormat.CHROME_TPU),
        (b'{"schemaVersion":1,"traceEvents":[{"name":"/device:TPU:0"}]}', TraceFormat.KINETO),
        (b'{"mean_ttft_ms": 12.5}', TraceFormat.SERVING_BENCHMARK),
        (b"SQLite format 3\0...", TraceFormat.NSYS),
        (b"HloModule jit_f, is_scheduled=true", TraceFormat.HLO),
        (b"\x0a\x80\x01\x08\x01\x12\x10/host:CPU\0", TraceFormat.XPLANE),
        (b"root:x:0:0", None),
        (b"", None),
        (b"\x1f\x8b\x08damaged", None),
    ],
)  # fmt: skip
def test_the_content_decides_the_format(tmp_path, content, kind) -> None:
    (tmp_path / "any.name").write_bytes(content)
    assert format_of(tmp_path / "any.name") is kind
    if not content.startswith(b"\x1f\x8b"):
        (tmp_path / "other").write_bytes(gzip.compress(content))
        assert format_of(tmp_path / "other") is kind


def tar(name: str, layout: int = tarfile.USTAR_FORMAT, **headers: str) -> bytes:
    buffer = io.BytesIO()
    folder = tarfile.TarInfo("folder")
    folder.type = tarfile.DIRTYPE
    with tarfile.open(fileobj=buffer, mode="w", format=layout, pax_headers=headers) as archive:
        archive.addfile(folder)
        archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, b"x")
    return buffer.getvalue()


EXECUTION = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "start_ts": 1, "nodes": [{"id": 1}]}
MLIR = b"#loc = loc(unknown)\nmodule @jit_f attributes {mhlo.num_partitions = 8 : i32} {"
OTHERS = {
    "a.tar": (tar("x/host.xplane.pb"), "a tar archive with 'x/host.xplane.pb'. Unpack it"),
    "pax.tar": (
        tar("é" * 120, tarfile.PAX_FORMAT, comment="x"),
        f"a tar archive with '{'é' * 120}'. Unpack it",
    ),
    "gnu.tar": (tar("n" * 120, tarfile.GNU_FORMAT), f"a tar archive with '{'n' * 120}'"),
    "cut.tar": (tar("n" * 120, tarfile.GNU_FORMAT)[:1024], "a tar archive. Unpack it"),
    "b.tar.gz": (gzip.compress(tar("host.xplane.pb")), "a tar archive with 'host.xplane.pb'"),
    "host.xplane.pb": (tar("host.xplane.pb"), "a tar archive"),
    "c.zip": (zipped("rank0.json"), "a zip archive with 'rank0.json'. Unpack it"),
    "model.pt": (zipped("archive/data.pkl"), "a checkpoint of PyTorch"),
    "snapshot.pickle": (
        pickle.dumps({"segments": [], "device_traces": []}),
        "a snapshot of PyTorch's memory .*would run its code",
    ),
    "any.et": (b"\x0a\x0a\x050.0.4\x00", "a Chakra execution trace"),
    "chakra": (b"\x07\x0a\x050.0.4\x10\x08\x01", "a Chakra execution trace"),
    "et.json": (
        json.dumps(EXECUTION).encode(),
        "an execution trace of PyTorch .*export_chrome_trace",
    ),
    "rocprof.json": (
        b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}',
        "JSON of rocprofv3. Record with",
    ),
    "config.json": (b'{"model_type": "llama"}', "a model config. Give it as --model"),
    "stats.json": (b'[{"cols": [], "rows": []}]', "a table of XProf"),
    "r.nsys-rep": (b"\x01\x02", "Nsight Systems. Export it with `nsys export --type sqlite"),
    "r.ncu-rep": (b"NVR\0\x01", "Nsight Compute"),
    "t.pftrace": (b"\x0a\x02\x08\x01", "a binary trace of Perfetto"),
    "packets": (b"\x0a\x04\x40\x05\x50\x01", "a binary trace of Perfetto"),
    "clock first": (b"\x0a\x08\x32\x04\x0a\x02\x08\x06\x50\x01", "a binary trace of Perfetto"),
    "hlo.pb": (
        b"\x0a\x0d\x0a\x05jit_f\x12\x04main",
        "a proto of an HLO module.*--frontend torchxla",
    ),
    "module.pb": (b"\x0a\x05jit_f\x12\x04main\x1a\x00", "a proto of an HLO module"),
    "f.mlir": (MLIR, "StableHLO or other MLIR. It is not compiled yet"),
    "f.mlirbc": (b"ML\xefR\x0d", "MLIR bytecode"),
    "events": (b"PAR1\x15\x04", "a Parquet table"),
    "t.json.zst": (b"\x28\xb5\x2f\xfd\x04", "compressed with zstd. Decompress it"),
    "pointer.json": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS.*git lfs pull"),
    "saved.json": (b"<!DOCTYPE html><html>", "a web page"),
    "kernels.csv": (b"name,calls\n", "a table of text"),
    "budget.toml": (b"model = 1\n", "a TOML file. Budgets are checked"),
    "budget": (b"# limits\n[[check]]\nmodel = 1\n", "a TOML or INI file. Budgets"),
    "runs.yaml": (b"model: x\n", "a YAML file.*meshscope sweep"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_kinds_are_named_with_a_remedy(tmp_path: Path, name: str) -> None:
    content, message = OTHERS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=f"{name}: this is .*{message}"):
        check_kind(tmp_path / name)
    assert format_of(tmp_path / name) is None


@pytest.mark.parametrize(
    "content",
    [
        b'\n\n{"schemaVersion": 1, "traceEvents": []}',
        b'{"nodes": 3, "traceEvents": []}',
        b"\n\nHloModule jit_f, is_scheduled=true\n",
        b"\x0a\x80\x01\x08\x01\x12\x10/host:CPU\0",
        b"SQLite format 3\0...",
        b"",
        b"root:x:0:0",
    ],
)
def test_traces_and_hlo_are_no_other_kind(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "any.name").write_bytes(content)
    check_kind(tmp_path / "any.name")
