#!/bin/bash
# The rollout engine on this card: rates, spread lengths, layers, tests. Results in $OUT/engine.
#   OUT=out bash tests/gpu/engine.sh [tests] [parts] [layers] [spread] [rates] [small] [nf4] [vllm]     (all but `rates` without words)
# Each part runs alone on the card. `vllm` measures it beside the portable engine, in the same processes; it needs vLLM.
: "${OUT:?OUT names the folder for results}"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
TO=$OUT/engine; mkdir -p "$TO"
began=$SECONDS

rollout() {  # rollout NAME ARGUMENTS...
    local name=$1; shift
    timeout 300 python3 -m grpo_portable bench rollout "$@" --json > "$TO/$name.json" 2> "$TO/$name.err"
    echo "$name: exit $?, $(( SECONDS - began )) s"
    python3 - "$TO/$name.json" <<'P'
import json, sys
from grpo_portable.bench.rollout import table
try:
    print(table(json.load(open(sys.argv[1]))))
except ValueError:
    print("no result")
P
}
script() {  # script NAME SECONDS FILE ARGUMENTS...
    local name=$1 limit=$2; shift 2
    timeout "$limit" python3 "$@" > "$TO/$name.txt" 2> "$TO/$name.err"
    echo "$name: exit $?, $(( SECONDS - began )) s"
    tail -n 60 "$TO/$name.txt"
}

for part in ${*:-tests parts layers spread small nf4 vllm}; do
    case $part in
    tests)
        timeout 300 python3 -m pytest -q -p no:cacheprovider tests/gpu/test_rollout_gpu.py > "$TO/tests.txt" 2>&1
        tail -n 3 "$TO/tests.txt" ;;
    parts) script where-the-time-goes 480 tests/gpu/where_the_time_goes.py qwen3-4b ;;
    layers)
        script layer-times 200 tests/gpu/layer_times.py
        script layer-times-2000-keys 100 tests/gpu/layer_times.py --keys 2000 qwen3-4b qwen3-1.7b ;;
    spread)
        for shape in qwen3-4b smollm2-135m; do
            rollout "$shape-32x8-spread-rows64" --shape "$shape" --prompts 32 --rows 64 --shortest 20 --engines portable,portable-fp8
        done ;;
    rates)
        rollout qwen3-4b-8x8 --shape qwen3-4b --engines portable,portable-fp8
        rollout qwen3-4b-32x8 --shape qwen3-4b --prompts 32 --engines portable,portable-fp8 ;;
    small)
        for shape in qwen3-1.7b qwen3-0.6b smollm2-135m; do
            rollout "$shape-8x8" --shape "$shape" --engines portable,portable-fp8
        done ;;
    nf4) rollout qwen3-4b-8x8-nf4 --shape qwen3-4b --base dense,nf4 --engines portable,portable-fp8 ;;
    vllm)
        rollout qwen3-4b-8x8-vllm --shape qwen3-4b --engines portable,portable-fp8,vllm
        rollout qwen3-4b-32x8-vllm --shape qwen3-4b --prompts 32 --engines portable,portable-fp8,vllm ;;
    *) echo "no part is named $part" >&2; exit 2 ;;
    esac
done
