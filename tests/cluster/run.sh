#!/usr/bin/env bash
# Every test that needs a cluster, on one machine: minutes.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'EOF'
usage: bash tests/cluster/run.sh [PYTEST_ARGUMENT ...]

Run the tests that need a cluster, on hosts that they make on this machine. Each test that cannot run prints what it
lacks, such as root or Slurm.

arguments:
  PYTEST_ARGUMENT   goes to pytest

example:
  bash tests/cluster/run.sh -k slurm

Debian: apt-get install iproute2 openssh-server pdsh openmpi-bin mpich slurm-wlm munge
In .venv: pip install -c requirements.txt -e '.[ray]' 'accelerate>=1.15'
Exit status: that of pytest, 0 if no test failed. More: docs/operations.md
EOF
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
megacore_extras='[test]'
source launch/environment.sh
export OMP_NUM_THREADS=1 MEGACORE_CLUSTER=1
python -m pytest --numprocesses 0 -v --durations 0 --durations-min 1 tests/cluster "$@"
