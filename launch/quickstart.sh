#!/usr/bin/env bash
# From a bare machine (Python 3.11+, git) to a small GPT trained on real text, in one command.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    printf '%s\n' "example: bash launch/quickstart.sh train.steps=200" \
        "Installs what is missing, prepares the Python standard library as a corpus, trains configs/gpt_tiny.json on all" \
        "local devices through the deepspeed launcher (4 ranks, tensor 2 × pipeline 2, on a CPU), and lets it write." \
        "Arguments are overrides of the config; MEGACORE_VENV and PYTHON as in launch/environment.sh."
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

corpus=data/stdlib
if [[ ! -f $corpus.idx || ! -f ${corpus}_valid.idx || ! -f $corpus.model ]]; then
    python launch/prepare.py --input python-stdlib --output "$corpus" --tokenizer sentencepiece:4096 --valid-fraction 0.05
fi

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
case $gpus in # the mesh: tensor and pipeline 2 where the devices allow it, data takes the rest
    0) ranks=4 mesh="parallel.tensor=2 parallel.pipeline=2" ;;
    1) ranks=1 mesh="" ;;
    *) ranks=$((gpus - gpus % 2)) mesh="parallel.tensor=2" && ((ranks % 4)) || mesh="$mesh parallel.pipeline=2" ;;
esac
if ((gpus == 0)); then
    export DS_ACCELERATOR=cpu
    [[ -n ${OMP_NUM_THREADS:-} ]] || export OMP_NUM_THREADS=$((($(nproc) + ranks - 1) / ranks))
fi

# No hostfile: all ranks are on this machine. (An empty name, so that one of the cluster's is not picked up.)
# shellcheck disable=SC2086
if deepspeed --log_level error --hostfile="" --num_gpus "$ranks" --master_port "${MASTER_PORT:-29500}" \
    launch/pretrain.py --config configs/gpt_tiny.json log.dir=runs/quickstart $mesh "$@"; then :; else
    status=$?
    printf 'training ended with status %d; the same command goes on from the last checkpoint\n' "$status" >&2
    exit "$status"
fi

printf '\nwhat the model writes:\n\n'
python launch/generate.py --checkpoint runs/quickstart --prompt $'def read(self, path):\n' --tokens 120
cat <<'EOF'

next:
  bash launch/quickstart.sh                                            goes on from what is there
  .venv/bin/python launch/generate.py --checkpoint runs/quickstart --prompt "import "
  .venv/bin/python launch/evaluate.py --checkpoint runs/quickstart
  .venv/bin/tensorboard --logdir runs/quickstart
  .venv/bin/python launch/plan.py --config configs/gpt_7b.json --world 8 --plot schedule.png
  bash tests/run.sh                                                    the tests
EOF
