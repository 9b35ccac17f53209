#!/bin/bash
# The reference systems with SmolLM2 in the big model's place, as docs/systems.md lists them. Results in $OUT.
#   OUT=out SMOLLM2=model.gguf GSM8K=folder bash tests/gpu/systems.sh [systems | precision | choose]
set -u
. "$(dirname "$0")/runs.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
results "$OUT"
mkdir -p "$TO/tables"

training() {  # wait until NAME (process PID) has made its first training step, or has ended
    while kill -0 "$2" 2>/dev/null && [ ! -s "$1/metrics.jsonl" ]; do sleep 0.5; done
}

MODEL="--model SmolLM2-135M-Instruct.gguf"
TEST="--data gsm8k/train.jsonl --set eval_data=gsm8k/test.jsonl"
# Learning rates: rsLoRA multiplies by alpha/sqrt(32), 5.7 in B and 11.3 in C, against 1 in A; so 2e-5 and 1e-5 move the weights
# about as A's 1e-4 does (a factor of 1.13). The bootstraps likewise: 1e-3, 2e-4 (B's own) and 1e-4.
# A: the recipe with the small model; a bootstrap first, since this model hardly ever writes the marker
A="gsm8k-qwen3-4b-qlora $MODEL --set bootstrap_epochs=1 --set bootstrap_limit=960 --set bootstrap_batch=16
   --set bootstrap_learning_rate=1e-3 --set learning_rate=1e-4 --set max_completion_tokens=256 --set steps=50"
# B: 200 rows in the tag format, four tag rewards; row scales, since blocks of 128 do not divide 576
B="math-qwen3-8b-fp8 $MODEL --set data_split=train --set fp8_scales=row --set eval_limit=300
   --set max_completion_tokens=256 --set prompts_per_step=16 --set learning_rate=2e-5 --set steps=50"
# C and D: one recipe, one seed; only path and scales differ. min_p 0: with 0.1 the sampler's log-probabilities are those of
# the truncated distribution, and sampler_kl tells the truncation (0.16 nats on a CPU, same weights) instead of the format
C="dapo-llama-3.2-1b-fp8 $MODEL $TEST --set fp8_scales=row --set eval_limit=300 --set bootstrap_epochs=1
   --set bootstrap_limit=200 --set bootstrap_batch=8 --set bootstrap_learning_rate=1e-4 --set learning_rate=1e-5
   --set context_tokens=512 --set prompts_per_step=16 --set min_p=0 --set steps=40"

next() { sleep "${STAGGER:-3}"; }  # starts that import torch and vLLM at the same second look like hangs to the doctor

systems() {
    go b-tags-fp8-vllm 300 $B $TEST --path fp8-vllm & next
    go a-gsm8k-qlora-hf 300 $A $TEST --path qlora-hf & next
    go c-fp8-vllm-tensor 300 $C --path fp8-vllm --set fp8_scales=tensor --no-fallback & next
    go c-fp8-hf 300 $C --path fp8-hf --no-fallback & next
    for scales in block row; do
        go d-embedded-fp8-$scales 150 arithmetic-embedded --path fp8-vllm --set fp8_scales=$scales --no-fallback & next
    done
    go d-embedded-bf16-hf 120 arithmetic-embedded --path bf16-hf --no-fallback &
    wait
}

precision() {  # the next run starts up on the CPU while the one before trains; medians are of steps after the first
    local path last=""
    for path in bf16-hf qlora-hf bf16-vllm fp8-vllm; do
        [ -n "$last" ] && training "$last" "$pid"
        last=c-$path
        go "$last" 300 $C --path "$path" --no-fallback &
        pid=$!
    done
    wait
}

choose() {
    mkdir -p part
    head -n -500 gsm8k/train.jsonl > part/train.jsonl
    tail -n 500 gsm8k/train.jsonl > part/held.jsonl
    local rate held="--data part/train.jsonl --set eval_data=part/held.jsonl --set eval_limit=500"
    for rate in 5e-5 1e-4 2e-4; do go choose-a-$rate 170 $A $held --set learning_rate=$rate --path qlora-hf & next; done
    for rate in 5e-6 2e-5 4e-5; do go choose-b-$rate 170 $B $held --set learning_rate=$rate --path bf16-hf & next; done
    wait
    table choose-a choose-a-5e-5 choose-a-1e-4 choose-a-2e-4
    table choose-b choose-b-5e-6 choose-b-2e-5 choose-b-4e-5
}

table() {  # table NAME RUN...: the runs that have steps, side by side
    local name=$1 run there=(); shift
    for run; do [ -s "$run/metrics.jsonl" ] && there+=("$run"); done
    [ ${#there[@]} -ge 2 ] || return 0
    python3 -m grpo_portable compare "${there[@]}" --chart "$TO/tables/$name.png" > "$TO/tables/$name.md" 2>> "$TO/logs/tables.log"
}

python3 -m doctor > "$TO/logs/doctor.txt" 2>&1  # also brings the libraries into the page cache
note "doctor done"
for group in ${*:-systems precision}; do "$group"; done
table precision c-bf16-hf c-bf16-vllm c-fp8-vllm c-qlora-hf
table fp8 c-bf16-hf c-bf16-vllm c-fp8-vllm c-fp8-vllm-tensor c-fp8-hf
table embedded d-embedded-bf16-hf d-embedded-fp8-row d-embedded-fp8-block
note "done"
cat "$TO"/tables/*.md 2>/dev/null
exit 0
