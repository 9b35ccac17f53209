#!/bin/bash
# One and two equal cards of one host, the same global batch: whole steps and their rollouts, SmolLM2 on GSM8K. Results in $OUT/x2.
#   OUT=out SMOLLM2=model.gguf GSM8K=folder bash tests/gpu/two_cards.sh [speed | smollm2 | rollout | faults | vllm]...
# In the order they are named; `speed smollm2` by default. Nothing else works on any card while `speed` and `rollout` measure.
set -u
. "$(dirname "$0")/runs.sh"
HERE=$(cd "$(dirname "$0")" && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# a program that uses NVLink multicast can put the GPUs of this host out of service: off in NCCL, PyTorch and NVSHMEM
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 NCCL_DEBUG=WARN
results "$OUT/x2"
SHM=$(mktemp -d /dev/shm/x2-XXXX || mktemp -d)
trap 'rm -rf "$SHM"' EXIT

bench() {  # bench FILE SECONDS ARGUMENTS...: each side's figures go to FILE.err as it ends, all of them to FILE.json
    local file=$1 limit=$2 code; shift 2
    note "$file starts"
    timeout -k 60 $(( 2 * limit + 120 )) python3 -m grpo_portable bench "$@" --limit "$limit" --json \
        > "$TO/$file.json" 2> "$TO/logs/$file.err"
    code=$?
    note "$file ended with $code"
    tail -n 25 "$TO/logs/$file.err"
}
joined() {  # joined NAME FILE...: one report of them in NAME.json, and its table
    local name=$1; shift
    python3 -m grpo_portable.bench.gpus join "${@/%/.json}" --json > "$TO/$name.json"
    python3 -m grpo_portable.bench.gpus join "${@/%/.json}" | tee "$TO/$name.txt"
}

SMOL="gsm8k-smollm2-135m --model SmolLM2-135M-Instruct.gguf --data gsm8k/train.jsonl --set eval_data=gsm8k/test.jsonl
  --set micro_batch=64 --set rollout_rows=256 --set learning_rate=2e-4 --no-fallback"
ROLL="rollout --shape qwen3-4b --prompts 64 --group 16 --new-tokens 256 --rows 256 --repeats 2"
STEP="--path bf16-hf --steps 2 --facts $TO/facts.json --set prompts_per_step=32 --set group_size=16 --set micro_batch=16
  --set max_completion_tokens=256 --set rollout_rows=256"

speed() {
    mkdir -p "$SHM/qwen3-4b"
    timeout 120 python3 -m grpo_portable.bench.checkpoint qwen3-4b "$SHM/qwen3-4b" > "$TO/logs/checkpoint.log" 2>&1 &
    python3 -m doctor --save-facts "$TO/facts.json" > "$TO/doctor.txt" 2>&1; note "the doctor ended with $?"
    wait $!; note "the checkpoint ended with $?"
    bench step-1 220 step "$SHM/qwen3-4b/step.yaml" $STEP --gpus 0
    bench step-2 180 step "$SHM/qwen3-4b/step.yaml" $STEP --gpus 0,1 --together
    joined step "$TO/step-1" "$TO/step-2"
    rm -rf "$SHM/qwen3-4b"
}
rollout() {
    bench rollout-1 120 $ROLL --gpus 0
    bench rollout-2 120 $ROLL --gpus 0,1 --together
    joined rollout "$TO/rollout-1" "$TO/rollout-2"
}
smollm2() {  # what they learn is compared, not their seconds: both at once
    go smollm2-one-card 300 $SMOL --path bf16-hf --set steps=16 --set bootstrap_epochs=0.2 --gpus 1 &
    sleep 3  # starts that import torch at the same second look like hangs to the doctor
    go smollm2-two-cards 300 $SMOL --path bf16-hf --set steps=16 --set bootstrap_epochs=0.2 --gpus 0,1
    wait
    python3 -m grpo_portable compare smollm2-one-card smollm2-two-cards 2>&1 | tee "$TO/compare.txt"
}
faults() {
    timeout -k 60 500 python3 -m pytest -q -p no:cacheprovider --basetemp "$SHM/tests" "$HERE/test_several_gpu.py" > "$TO/faults.txt" 2>&1
    note "faults ended with $?"; tail -n 30 "$TO/faults.txt"
}
vllm() {
    bench rollout-vllm 140 $ROLL --engines vllm --gpus 0,1  # each of both within 140 s
    python3 -m grpo_portable.bench.gpus join "$TO/rollout-vllm.json"
    go smollm2-vllm-two-cards 200 $SMOL --path bf16-vllm --set eval_limit=300 --set steps=6 --set bootstrap_epochs=0 --gpus 0,1
}

note "$(nvidia-smi --query-gpu=index,name,memory.free --format=csv,noheader | tr '\n' ';')"
nvidia-smi topo -m > "$TO/topology.txt" 2>&1
for part in ${*:-speed smollm2}; do
    case $part in speed | rollout | smollm2 | faults | vllm) "$part" ;; *) note "there is no part $part"; exit 2 ;; esac
done
note "done"
