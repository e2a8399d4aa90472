# meshscope with the TPU compiler, for linux/amd64:
#   docker build --platform linux/amd64 -t meshscope .
#   docker run --rm -v "$PWD:/work" meshscope predict Qwen/Qwen3-32B --topology v6e-8 --plan tp=8
FROM python:3.11-slim
COPY pyproject.toml README.md LICENSE MANIFEST.in constraints.txt /opt/meshscope/
COPY src /opt/meshscope/src
RUN python -m pip install --no-cache-dir -c /opt/meshscope/constraints.txt "/opt/meshscope[tpu,mcp]" \
    && useradd --create-home user \
    && install -d -o user /work
USER user
WORKDIR /work
ENTRYPOINT ["meshscope"]
