#!/bin/bash
# One and two equal cards of one host, the same global batch: rollouts, whole steps, SmolLM2 on GSM8K. Results in $OUT/x2.
#   OUT=out SMOLLM2=model.gguf GSM8K=folder bash tests/gpu/two_cards.sh [both | faults | vllm]
set -u
HERE=$(cd "$(dirname "$0")" && pwd)
: "${OUT:?OUT names the folder for results}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
# a program that uses NVLink multicast can put the GPUs of this host out of service: off in NCCL, PyTorch and NVSHMEM
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
mkdir -p "$OUT/x2/logs" "$OUT/x2/reports" "$OUT/x2/runs"
TO=$(cd "$OUT/x2" && pwd)
cd "$OUT/x2/runs" || exit 1
ln -sfn "${GSM8K:?the folder with train.jsonl and test.jsonl}" gsm8k
ln -sfn "${SMOLLM2:?the GGUF file}" SmolLM2-135M-Instruct.gguf
SHM=$(mktemp -d /dev/shm/x2-XXXX || mktemp -d)
trap 'rm -rf "$SHM"' EXIT
began=$SECONDS
note() { echo "$(( SECONDS - began )) s  $*" | tee -a "$TO/summary.txt"; }
gp() { python3 -m grpo_portable "$@"; }

publish() {  # what reports/ keeps of a run
    local to="$TO/reports/$1" name
    [ -d "$1" ] || return 0
    mkdir -p "$to/generations"
    for name in events.jsonl facts.json metrics.jsonl plan.json recipe.yaml report.md run.json scores.json rung.json; do
        [ -f "$1/$name" ] && cp "$1/$name" "$to/"
    done
    [ -d "$1/charts" ] && cp -r "$1/charts" "$to/"
    for name in "$1"/generations/*.jsonl; do [ -f "$name" ] && gzip -n -c "$name" > "$to/generations/$(basename "$name").gz"; done
    [ -f "$1/worker.log" ] && tail -c 200000 "$1/worker.log" > "$TO/logs/$1.worker.log"
    return 0
}
go() {  # go NAME SECONDS ARGUMENTS...
    local name=$1 limit=$2; shift 2
    note "$name starts"
    timeout -k 15 "$limit" python3 -m grpo_portable train "$@" --auto --out "$name" > "$TO/logs/$name.log" 2>&1
    note "$name ended with $?"
    publish "$name"
}
bench() {  # bench FILE SECONDS ARGUMENTS...
    local file=$1 limit=$2; shift 2
    timeout -k 15 "$limit" python3 -m grpo_portable bench "$@" --json > "$TO/$file.json" 2> "$TO/logs/$file.err"
    note "$file ended with $?"
}

note "$(nvidia-smi --query-gpu=index,name,memory.free --format=csv,noheader | tr '\n' ';')"
nvidia-smi topo -m > "$TO/topology.txt" 2>&1
python3 -m doctor --save-facts "$TO/facts.json" > "$TO/doctor.txt" 2>&1; note "the doctor ended with $?"

SMOL="gsm8k-smollm2-135m --path bf16-hf --model SmolLM2-135M-Instruct.gguf --data gsm8k/train.jsonl --set eval_data=gsm8k/test.jsonl
  --set steps=30 --set micro_batch=64 --set rollout_rows=256 --set learning_rate=2e-4 --set bootstrap_epochs=0.5 --no-fallback"
ROLL="rollout --shape qwen3-4b --prompts 64 --group 16 --new-tokens 256 --rows 256 --repeats 2"
STEP="--path bf16-hf --steps 2 --facts $TO/facts.json --set prompts_per_step=32 --set group_size=16 --set max_completion_tokens=256 --set rollout_rows=256"

both() {  # one card alone (the other one trains SmolLM2 meanwhile), then two together
    mkdir -p "$SHM/qwen3-4b"
    go smollm2-one-card 170 $SMOL --gpus 1 & smol=$!
    CUDA_VISIBLE_DEVICES=1 timeout 90 python3 -m grpo_portable.bench_checkpoint qwen3-4b "$SHM/qwen3-4b" > "$TO/logs/checkpoint.log" 2>&1 & made=$!
    bench rollout-1 100 $ROLL --gpus 0
    wait $made; note "checkpoint"
    bench step-1 150 step "$SHM/qwen3-4b/step.yaml" $STEP --gpus 0
    wait $smol
    bench rollout-2 100 $ROLL --gpus 0,1 --together
    bench step-2 120 step "$SHM/qwen3-4b/step.yaml" $STEP --gpus 0,1 --together
    go smollm2-two-cards 150 $SMOL --gpus 0,1
    gp compare smollm2-one-card smollm2-two-cards > "$TO/compare.txt" 2>&1; note "compare ended with $?"
    python3 -m grpo_portable.bench_gpus join "$TO/rollout-1.json" "$TO/rollout-2.json" | tee "$TO/rollout.txt"
    python3 -m grpo_portable.bench_gpus join "$TO/step-1.json" "$TO/step-2.json" | tee "$TO/step.txt"
    cat "$TO/compare.txt"
}
faults() {
    timeout -k 15 400 python3 -m pytest -q -p no:cacheprovider --basetemp "$SHM/tests" "$HERE/test_several_gpu.py" \
        > "$TO/faults.txt" 2>&1
    note "tests ended with $?"; tail -40 "$TO/faults.txt"
}
vllm() {
    bench rollout-vllm 280 $ROLL --engines vllm --gpus 0,1
    python3 -m grpo_portable.bench_gpus join "$TO/rollout-vllm.json" | tee "$TO/rollout-vllm.txt"
    go smollm2-vllm-two-cards 200 gsm8k-smollm2-135m --path bf16-vllm --model SmolLM2-135M-Instruct.gguf --data gsm8k/train.jsonl \
        --set eval_data=gsm8k/test.jsonl --set eval_limit=300 --set steps=6 --set micro_batch=64 --set bootstrap_epochs=0 --no-fallback --gpus 0,1
}
case "${1:-both}" in both) both ;; faults) faults ;; vllm) vllm ;; *) echo "both, faults or vllm"; exit 2 ;; esac
note "done"
