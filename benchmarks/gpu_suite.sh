#!/usr/bin/env bash
# Everything that one GPU can show, in two commands of less than 10 minutes each: tests and kernels; training steps, and a peer's beside them.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    printf '%s\n' "example: bash benchmarks/gpu_suite.sh tests; bash benchmarks/gpu_suite.sh speed" \
        "tests: tests/gpu, then benchmarks.kernels. speed: benchmarks.throughput on configs/gpt_124m, 350m and 1b in bf16 with and" \
        "without torch.compile (memory, MFU, where the step goes; a trace of the largest), then transformers, compiled, beside each." \
        "On several GPUs also benchmarks.collectives and the 1b model in tensor, pipeline, data and sharded layouts." \
        "The tables come last; JSON, charts and trace in benchmarks/results. --dry-run does both at tiny sizes on a CPU, with two ranks." \
        "Each ends within 10 minutes; without a word, both run, one after the other." \
        "PYTHON names the interpreter (python)."
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python} parts=${1:-tests speed} limit=570 patience=1 status=0
logs=$(mktemp -d) results=benchmarks/results kernels=(--seconds 110) configs=(gpt_124m gpt_350m gpt_1b) compile=(true false) steps=8 micro_batches=4
peer=(--peers transformers-compiled --layouts one --precisions bf16 --rounds 5 --limit 60) precision=bf16 largest=256 small=()
if [[ ${1:-} == --dry-run ]]; then
    parts="tests speed" limit=3600 patience=10 results=$logs kernels=(--dry-run) configs=(gpt_124m) compile=(false) steps=1 micro_batches=2 precision=fp32 largest=0.01 ranks=2
    peer=(--peers transformers-compiled --layouts one --precisions fp32 --rounds 1 --limit 300)
    small=(model.num_layers=2 model.hidden_size=64 model.num_heads=2 model.vocab_size=256 train.seq_len=32 train.micro_batch_size=1)
elif [[ $parts != tests && $parts != speed && $parts != "tests speed" ]]; then
    printf '%s\n' "$parts: unknown (right: tests, speed, --dry-run, or nothing)" >&2
    exit 2
else
    [[ $parts == "tests speed" ]] && limit=1140
    ranks=$("$python" -c "import torch; print(torch.cuda.device_count())")
fi
day=$(date -u +%F)
training=$results/training_$day.jsonl

# Runs a command for so many seconds at most, and no longer than is left of the whole; its output goes to a log.
stage() {
    local name=$1 seconds=$(($2 * patience)) left=$((limit - SECONDS)) failed
    shift 2
    if ((left < 5)); then
        printf '%s: no time left\n' "$name" | tee "$logs/$name.txt"
        status=1
        return
    fi
    printf '%s ... ' "$name"
    timeout "$((seconds < left ? seconds : left))" "$@" >"$logs/$name.txt" 2>"$logs/$name.err" && failed=0 || failed=$?
    if ((failed == 0)); then
        printf 'done (%d s)\n' "$SECONDS"
    else
        printf 'FAILED, status %d, 124 being out of time (%d s)\n' "$failed" "$SECONDS"
        tail -n 5 "$logs/$name.err" >>"$logs/$name.txt"
        status=1
    fi
}

# A config's steps, with a global batch of so many microbatches; more arguments after its name.
overrides() {
    local micro_batch
    micro_batch=$("$python" -c "import json; print(json.load(open('configs/$1.json'))['train']['micro_batch_size'])")
    ((${#small[@]})) && micro_batch=1
    printf '%s\n' "train.global_batch_size=$((micro_batch * $2))" "train.precision=$precision" "${small[@]}"
}

if [[ $parts == *tests* ]]; then
    stage tests 360 "$python" -m pytest -q tests/gpu
    stage kernels 200 "$python" -m benchmarks.kernels "${kernels[@]}" --output "$results"
fi

largest_config=${configs[-1]}
[[ $parts == *speed* ]] || configs=() ranks=1
for config in "${configs[@]}"; do
    mapfile -t own < <(overrides "$config" "$micro_batches")
    for compiled in "${compile[@]}"; do
        profile=()
        [[ $config == "$largest_config" && $compiled == "${compile[0]}" ]] && profile=(--profile "$results/trace_${config}_$day.json")
        stage "$config-compile-$compiled" 120 "$python" -m benchmarks.throughput --config "configs/$config.json" --steps "$steps" \
            "${profile[@]}" train.compile="$compiled" "${own[@]}"
    done
done
for config in "${configs[@]}"; do
    mapfile -t own < <(overrides "$config" "$micro_batches")
    stage "$config-beside-transformers" 75 "$python" -m benchmarks.peers --config "configs/$config.json" "${peer[@]}" \
        --output "$results/peers_${config}_$day.json" train.compile="${compile[0]}" "${own[@]}"
done
if ((ranks > 1)); then
    mapfile -t own < <(overrides "$largest_config" "$((micro_batches * ranks))")
    stage collectives 60 "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m benchmarks.collectives \
        --config "configs/$largest_config.json" --largest "$largest" --output "$results/collectives_$day.json" "parallel.tensor=$ranks" "${own[@]}"
    stage layouts 150 "$python" -m benchmarks.throughput --config "configs/$largest_config.json" --steps "$steps" \
        --layouts "dp$ranks,tp${ranks},tp${ranks}sp,pp$ranks" --output "$results/layouts_$day.json" "${own[@]}"
    stage layouts-sharded 60 "$python" -m benchmarks.throughput --config "configs/$largest_config.json" --steps "$steps" \
        --layouts "dp$ranks" --output "$results/layouts_sharded_$day.json" engine.shard_optimizer=true "${own[@]}"
fi

for log in "$logs"/*.txt; do
    name=$(basename "$log" .txt)
    printf '\n== %s\n' "$name"
    case $name in
    *-compile-*)
        cat "${log%.txt}.err"
        cat "$log" >>"$training"
        ;;
    layouts* | collectives) cat "${log%.txt}.err" ;;
    *) cat "$log" ;;
    esac
done
printf '\n%d s, logs in %s, figures in %s\n' "$SECONDS" "$logs" "$results"
exit "$status"
