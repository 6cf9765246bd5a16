#!/usr/bin/env bash
# From a bare machine (Python 3.11+, git) to a small GPT trained on real text, in one command.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'EOF'
usage: bash launch/quickstart.sh [section.key=value ...]

Install what training needs, train a small GPT on the text of Python's standard library, and generate text with it.
configs/gpt_tiny.json trains on all local devices through the deepspeed launcher: on a CPU, four ranks (tensor 2 ×
pipeline 2). The same command resumes from the last checkpoint. Without a network, training works once the packages
are installed.

arguments:
  section.key=value   a setting that replaces the config's, such as train.steps=200

environment:
  MEGACORE_VENV       the folder of the virtual environment (.venv)
  PYTHON              the interpreter to make it with (the first that is 3.11 or newer)
  MASTER_PORT         the port on which the ranks meet (29500)

example:
  bash launch/quickstart.sh train.steps=200

Exit status: 0 trained, 2 wrong settings, 75 stopped on request after saving, others: failed.
EOF
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
    printf 'training ended with status %d; the same command resumes from the last checkpoint\n' "$status" >&2
    exit "$status"
fi

printf '\ntext that the model generates:\n\n'
python launch/generate.py --checkpoint runs/quickstart --prompt $'def read(self, path):\n' --tokens 120
cat <<'EOF'

The validation loss is about 0.5 higher than the training loss. This is not overfitting: the config's 300 steps read no
token twice. Validation reads whole files that training never sees, and almost none of the easy tables in encodings/.

next:
  bash launch/quickstart.sh                                            resumes from the last checkpoint
  .venv/bin/python launch/generate.py --checkpoint runs/quickstart --prompt "import "
  .venv/bin/python launch/evaluate.py --checkpoint runs/quickstart
  .venv/bin/python launch/compare.py --plot runs/quickstart/loss.png runs/quickstart
  .venv/bin/tensorboard --logdir runs/quickstart
  .venv/bin/python launch/plan.py --config configs/gpt_7b.json --world 8 --plot schedule.png
  bash tests/run.sh                                                    the tests
EOF
