#!/bin/bash
# The GPU check on a machine without this project's environment: one that has torch, transformers, accelerate, numpy,
# pyarrow, pillow and xxhash with what these need, and reaches no package index.
#
#   bash bench/gpu_check.sh wheels               where there is an index: the few that it lacks, into .wheels/ (9 MB)
#   bash bench/gpu_check.sh [what bench.gpu_check takes]      there: installs these into a temporary folder, and checks
#
# PYTHON names another interpreter than python3; the wheels are those of requirements.lock, for its version of Python.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
LACKING=(annotated-types certifi charset-normalizer diffusers idna importlib-metadata pydantic pydantic-core
  pydantic-settings prometheus-client python-dotenv requests typing-extensions typing-inspection urllib3 zipp)

if [ "${1:-}" = wheels ]; then
  VERSION=${2:-3.12}
  mkdir -p .wheels && rm -f .wheels/*.whl
  for name in "${LACKING[@]}"; do
    pinned=$(grep -E "^$name==" requirements.lock | cut -d' ' -f1 | cut -d';' -f1)
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$VERSION" --implementation cp \
      --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
      --dest .wheels "$pinned"
  done
  du -ch .wheels/*.whl | tail -1
  exit
fi

ls .wheels/*.whl >/dev/null 2>&1 || { echo "error: there are no wheels in .wheels/. Where there is a package index:" \
  "bash bench/gpu_check.sh wheels" >&2; exit 2; }
SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
"$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$SITE" .wheels/*.whl
PYTHONPATH=$SITE:$PWD "$PYTHON" -m bench.gpu_check "$@"
