export MODEL_NAME="Qwen/Qwen3-8B"  # or "Qwen/Qwen3-32B"

JAX_COMPILATION_CACHE_DIR=/tmp/jit_cache \
uv run python -u -m sgl_jax.launch_server \
    --model-path ${MODEL_NAME} \
    --trust-remote-code \
    --tp-size=4 \
    --device=tpu \
    --mem-fraction-static=0.8 \
    --chunked-prefill-size=2048 \
    --download-dir=/tmp \
    --dtype=bfloat16 \
    --max-running-requests 256 \
    --skip-server-warmup \
    --page-size=128
uv run python -m sgl_jax.bench_serving \
    --backend sgl-jax \
    --dataset-name random \
    --num-prompts 256 \
    --random-input 4096 \
    --random-output 1024 \
    --max-concurrency 64 \
    --random-range-ratio 1 \
    --warmup-requests 0
