#!/bin/bash
# The memory ledger beside measured peaks, one JSON a (shape, path), and a step of TRL's default. Results in $OUT/memory.
#   OUT=out bash tests/gpu/memory.sh [--no-trl]
mkdir -p "$OUT/memory"
WHERE=$(mktemp -d /dev/shm/bench-XXXX || mktemp -d)
trap 'rm -rf "$WHERE"' EXIT
grpo-doctor --save-facts "$WHERE/facts.json" >/dev/null 2>&1 || python3 -m doctor --save-facts "$WHERE/facts.json" >/dev/null 2>&1
cp "$WHERE/facts.json" "$OUT/memory/facts.json" 2>/dev/null
FACTS=""; [ -s "$WHERE/facts.json" ] && FACTS="--facts $WHERE/facts.json"

checkpoint() { # shape
  mkdir -p "$WHERE/$1"
  timeout 120 python3 -m grpo_portable.bench.checkpoint "$1" "$WHERE/$1" >"$OUT/memory/$1.checkpoint.log" 2>&1
}
step() { # shape path sides seconds steps
  began=$(date +%s.%N)
  timeout "$4" python3 -m grpo_portable.cli bench step "$WHERE/$1/step.yaml" --path "$2" --sides "$3" --steps "$5" $FACTS --json \
    >"$OUT/memory/$1.$2.$3.json" 2>"$OUT/memory/$1.$2.$3.err"
  echo "$1 $2 $3: exit $?, $(echo "$(date +%s.%N) - $began" | bc 2>/dev/null) s"
}

checkpoint qwen3-4b
step qwen3-4b bf16-hf ours 90 1
step qwen3-4b qlora-hf ours 90 1
step qwen3-4b fp8-hf ours 90 1
[ "$1" = --no-trl ] || step qwen3-4b bf16-hf trl 150 1
rm -rf "$WHERE/qwen3-4b"
checkpoint qwen3-1.7b
step qwen3-1.7b bf16-hf ours 60 1
step qwen3-1.7b bf16-vllm ours 150 1
step qwen3-1.7b fp8-vllm ours 150 1
step qwen3-1.7b qlora-hf ours 60 1
rm -rf "$WHERE/qwen3-1.7b"
checkpoint llama-3.2-1b
step llama-3.2-1b bf16-hf ours 60 1
python3 - "$OUT/memory" <<'P'
import json, sys, pathlib
print(f"{'':<34}{'s/step':>8}{'device':>8}{'ledger':>8}{'ratio':>7}{'/alloc':>7}  allocated by phase")
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.*-*.*.json")):
    text = file.read_text()
    try:
        report = json.loads(text)
    except ValueError:
        print(file.stem, " ".join(text.split())[:300]); continue
    for side in ("ours", "trl"):
        if side in report:
            s, m = report[side], report[side]["memory"]
            print(f"{file.stem:<34}{s.get('seconds_median', 0):>8}{m['device_peak_gib'] or 0:>8}{m['ledger_sum_gib'] or 0:>8}"
                  f"{m['ledger_over_device'] or 0:>7}{m['ledger_over_allocated'] or 0:>7}  {m['allocated_peak_gib']} {s.get('error', '')[:300]}")
P
