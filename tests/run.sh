#!/usr/bin/env bash
# Lint, types and tests, in an environment of their own. Further arguments go to pytest.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    printf '%s\n' "example: bash tests/run.sh -k 'pipeline and not fp16' -x" "--quick: the tests that find most mistakes soonest, in 2 minutes" \
        "Installs what is missing, then runs ruff, mypy and pytest [arguments]; MEGACORE_VENV and PYTHON as in launch/environment.sh."
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
export OMP_NUM_THREADS=1 # many ranks share the cores: more threads each would only wait for one another

ruff check .
# Types beside the tests: both together take the cores no longer than one after the other, which leaves one idle for a minute.
types=$(mktemp)
nice mypy megacore kernels launch benchmarks >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
# Three files at a time, each with workers of its own, also on two cores: ranks wait for one another, and processes for their start.
# With two, files of ranks left half of the cores' time idle. In the order of the folders: tests/unit comes last, whose files
# are short, so that no worker is left alone with a long one.
status=0
python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@" || status=$?
wait "$checker" || status=$((status ? status : 1))
cat "$types"
exit "$status"
