# syntax=docker/dockerfile:1
# The worker on a GPU: vLLM 0.26.0 with torch for CUDA 13.0, Tenantry, its kernels.
#   docker build -f deploy/worker-gpu.Dockerfile -t tenantry-worker-gpu .
#   docker run --gpus all --ipc=host -v /models:/models:ro -e TENANTRY_NATS_URL=... -e TENANTRY_WORKER_MODEL=/models/gpt-oss-20b ...
# To pin what a tag names today: --build-arg CUDA_IMAGE=nvidia/cuda@sha256:...
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04

FROM ${CUDA_IMAGE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/tenantry
ENV PATH=/opt/tenantry/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# First what changes least and is nearly all of the image.
COPY constraints/gpu.txt /src/constraints/gpu.txt
RUN pip install -r /src/constraints/gpu.txt \
 && python -c "import torch; assert torch.version.cuda.startswith('13.'), torch.version.cuda"
COPY pyproject.toml README.md /src/
COPY shared /src/shared
COPY services /src/services
COPY tenantry /src/tenantry
COPY kernels/pyproject.toml /src/kernels/pyproject.toml
COPY kernels/README.md /src/kernels/README.md
COPY kernels/lora_kernels /src/kernels/lora_kernels
RUN pip install --no-deps /src/kernels /src \
 && python -c "import importlib.metadata as m; assert m.version('vllm') == '0.26.0' and m.version('lora-kernels')"

FROM ${CUDA_IMAGE}
# Triton compiles its launchers with a C compiler and Python's headers when a kernel is first used.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-dev gcc libc6-dev tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 tenantry \
 && install -d -o tenantry -g tenantry /var/cache/tenantry /run/tenantry
COPY --from=build /opt/tenantry /opt/tenantry
ENV PATH=/opt/tenantry/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/home/tenantry \
    TRITON_CACHE_DIR=/var/cache/tenantry/triton \
    VLLM_CACHE_ROOT=/var/cache/tenantry/vllm \
    VLLM_NO_USAGE_STATS=1 \
    VLLM_USE_FLASHINFER_SAMPLER=0 \
    TENANTRY_WORKER_DTYPE=bfloat16 \
    TENANTRY_WORKER_CACHE_DIR=/var/cache/tenantry \
    TENANTRY_WORKER_HEALTH_FILE=/run/tenantry/state
USER 10001
WORKDIR /home/tenantry
VOLUME /var/cache/tenantry
# A large model takes minutes to be read; until then the worker is starting, not unhealthy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
  CMD ["python", "-m", "services.worker.health", "/run/tenantry/state"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "python", "-m", "services.worker"]
