#!/usr/bin/env bash
# Everything that needs a GPU, in one command and less than 8 minutes: the kernels' tests, their bandwidth, training steps.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    printf '%s\n' "example: bash benchmarks/gpu_suite.sh" \
        "Tests of tests/gpu, then benchmarks.kernels, then benchmarks.throughput on configs/gpt_124m, 350m and 1b in bf16 with and" \
        "without torch.compile; the tables come last, JSON and chart in benchmarks/results. --dry-run does it at tiny sizes on a CPU." \
        "PYTHON names the interpreter (python)."
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python} limit=470 status=0
logs=$(mktemp -d) results=benchmarks/results kernels=(--seconds 150) configs=(gpt_124m gpt_350m gpt_1b) compile=(false true) steps=8 micro_batches=4
if [[ ${1:-} == --dry-run ]]; then
    results=$logs kernels=(--dry-run) configs=(gpt_tiny) compile=(false) steps=1 micro_batches=1
fi
training=$results/training_$(date -u +%F).jsonl

# Runs a command for so many seconds at most, and no longer than is left of the whole; its output goes to a log.
stage() {
    local name=$1 seconds=$2 left=$((limit - SECONDS))
    shift 2
    if ((left < 5)); then
        printf '%s: no time left\n' "$name" | tee "$logs/$name.txt"
        status=1
        return
    fi
    printf '%s ... ' "$name"
    if timeout "$((seconds < left ? seconds : left))" "$@" >"$logs/$name.txt" 2>"$logs/$name.err"; then
        printf 'done (%d s)\n' "$SECONDS"
    else
        printf 'FAILED, status %d, 124 being out of time (%d s)\n' "$?" "$SECONDS"
        tail -n 5 "$logs/$name.err" >>"$logs/$name.txt"
        status=1
    fi
}

stage tests 120 "$python" -m pytest -q tests/gpu
stage kernels 220 "$python" -m benchmarks.kernels "${kernels[@]}" --output "$results"
for config in "${configs[@]}"; do
    micro_batch=$("$python" -c "import json; print(json.load(open('configs/$config.json'))['train']['micro_batch_size'])")
    for compiled in "${compile[@]}"; do
        stage "$config-compile-$compiled" 60 "$python" -m benchmarks.throughput --config "configs/$config.json" --steps "$steps" \
            train.compile=$compiled train.precision=bf16 train.global_batch_size=$((micro_batch * micro_batches))
    done
done

for name in tests kernels; do
    printf '\n== %s\n' "$name"
    cat "$logs/$name.txt"
done
for log in "$logs"/gpt_*.err; do
    name=$(basename "$log" .err)
    printf '\n== %s\n' "$name"
    cat "$log"
    cat "$logs/$name.txt" >>"$training"
done
printf '\n%d s, logs in %s, figures in %s\n' "$SECONDS" "$logs" "$results"
exit "$status"
