#!/usr/bin/env bash
# Regenerates the Python of proto/warmfront_pb in a virtual environment of its own: grpcio-tools 1.76 needs protobuf < 7,
# while grpcio-health-checking and -reflection 1.85 need 7. Its output runs on both.
#   proto/generate.sh [OUTPUT_DIR]      default: beside the .proto files
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-.}
venv=${WARMFRONT_PROTO_VENV:-../.venv-proto}
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet 'grpcio-tools==1.76.*' 'protobuf>=6.33.5,<7'
fi
"$venv/bin/python" -m grpc_tools.protoc -I. --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" warmfront_pb/v1/*.proto
