# syntax=docker/dockerfile:1
# The router: CPU only, no model files. From the repository's root:
#   docker build -f docker/router.Dockerfile -t warmfront/router:0.1.0 .
# For a release give the base by digest: --build-arg PYTHON_IMAGE=docker.io/library/python@sha256:...
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/warmfront
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY cache cache
COPY common common
COPY proto proto
COPY router router
COPY warmfront warmfront
COPY worker worker
# Versions are those of the lock file; a package that is not in it may not come in by itself.
RUN /opt/warmfront/bin/pip install --constraint requirements.lock '.[router]'

FROM ${PYTHON_IMAGE} AS router
LABEL org.opencontainers.image.title="warmfront router" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin warmfront
COPY --from=build /opt/warmfront /opt/warmfront
ENV PATH=/opt/warmfront/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 WARMFRONT_METRICS_PORT=9090
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 50051
# The metrics port is plain HTTP even where the others speak TLS.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['WARMFRONT_METRICS_PORT']}/healthz\", timeout=2)"]
ENTRYPOINT ["warmfront", "router"]
