#!/bin/bash
# Run the GPU check on a machine without this project's environment and without a package index. It needs torch,
# transformers, accelerate, numpy, pyarrow, pillow and xxhash with their dependencies.
#
#   bash bench/gpu_check.sh wheels [3.12]    with a package index: download the missing packages to .wheels/ (9 MB), and
#                                            torchao, which only the float8 part imports, to .torchao/ (21 MB)
#   bash bench/gpu_check.sh [OPTIONS]        on the machine: install them to a temporary folder and run the check
#
# OPTIONS are those of bench.gpu_check. PYTHON selects an interpreter other than python3. The wheels have the versions of
# requirements.lock, for the given version of Python.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
MISSING=(annotated-types certifi charset-normalizer diffusers idna importlib-metadata pydantic pydantic-core
  pydantic-settings prometheus-client python-dotenv requests typing-extensions typing-inspection urllib3 zipp)

if [ "${1:-}" = wheels ]; then
  VERSION=${2:-3.12}
  mkdir -p .wheels && rm -f .wheels/*.whl
  for name in "${MISSING[@]}"; do
    pinned=$(grep -E "^$name==" requirements.lock | cut -d' ' -f1 | cut -d';' -f1)
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$VERSION" --implementation cp \
      --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
      --dest .wheels "$pinned"
  done
  torchao=$(sed -n 's/^TORCHAO = //p' Makefile)
  "$PYTHON" -m pip install --quiet --no-deps --only-binary=:all: --python-version "$VERSION" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --upgrade --target .torchao "$torchao"
  du -ch .wheels/*.whl .torchao | tail -1
  exit
fi

ls .wheels/*.whl >/dev/null 2>&1 || { echo "error: There are no wheels in .wheels/. Download them on a machine" \
  "with a package index, with 'bash bench/gpu_check.sh wheels', and copy the folder here." >&2; exit 2; }
SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
"$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$SITE" .wheels/*.whl
PYTHONPATH=$SITE:$PWD "$PYTHON" -m bench.gpu_check "$@"
