#!/usr/bin/env bash
# Every test that needs a cluster, on one machine: minutes. Each says what it lacks here, if anything (root, Slurm, …).
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    printf '%s\n' "example: bash tests/cluster/run.sh -k slurm" "Further arguments go to pytest. Debian: apt-get install iproute2 openssh-server pdsh openmpi-bin mpich slurm-wlm munge" \
        "In .venv: pip install -c requirements.txt -e '.[ray]' 'accelerate>=1.15'"
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
megacore_extras='[test]'
source launch/environment.sh
export OMP_NUM_THREADS=1 MEGACORE_CLUSTER=1
python -m pytest --numprocesses 0 -v --durations 0 --durations-min 1 tests/cluster "$@"
