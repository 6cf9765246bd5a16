#!/usr/bin/env bash
# Format, lint, types and tests, in a separate environment. Further arguments go to pytest.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'EOF'
usage: bash tests/run.sh [--quick] [PYTEST_ARGUMENT ...]

Run ruff, mypy and pytest in a virtual environment, .venv, with the tested versions of all packages, and install what
is missing. Environment: MEGACORE_VENV and PYTHON as in launch/quickstart.sh.

arguments:
  --quick           run the tests that find most mistakes soonest, in 2 minutes
  PYTEST_ARGUMENT   goes to pytest

example:
  bash tests/run.sh -k 'pipeline and not fp16' -x

Exit status: 0 if all checks pass. More: CONTRIBUTING.md
EOF
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
megacore_extras='[test]'
source launch/environment.sh
export OMP_NUM_THREADS=1 # many ranks share the cores: more threads each would only wait for one another

ruff format --check .
ruff check .
# Types are checked while the tests run, because mypy alone would leave a core idle for a minute.
types=$(mktemp)
nice mypy megacore kernels launch benchmarks >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
# Three files at a time, each with its own workers, even on two cores: ranks wait for each other, and
# processes for their start, so two files at a time left half of the cores' time idle. Files run in the order
# of the folders. The short files of tests/unit come last, so that no worker ends alone with a long one.
status=0
python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@" || status=$?
wait "$checker" || status=$((status ? status : 1))
cat "$types"
exit "$status"
