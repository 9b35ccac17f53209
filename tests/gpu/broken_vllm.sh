#!/bin/bash
# `train --auto` with a vLLM of which one module is broken: its import works, its engine does not start. The run must end on a path
# without vLLM, with the reason in its report.   OUT=out SMOLLM2=model.gguf GSM8K=folder bash tests/gpu/broken_vllm.sh
set -eu
: "${OUT:?OUT names the folder for results}"
mkdir -p "$OUT/broken" && cd "$OUT/broken"
ln -sfn "${GSM8K:?the folder with train.jsonl and test.jsonl}" gsm8k
ln -sfn "${SMOLLM2:?the GGUF file}" SmolLM2-135M-Instruct.gguf
shadow=$(mktemp -d); trap 'rm -rf "$shadow"' EXIT
installed=$(python3 -c 'import importlib.util; print(importlib.util.find_spec("vllm").submodule_search_locations[0])')
cp -rs "$installed" "$shadow/vllm"
cp -r "$(dirname "$installed")"/vllm-*.dist-info "$shadow/"
rm "$shadow/vllm/v1/worker/gpu_worker.py"
echo "raise ImportError(\"cannot import name 'Worker': half-updated installation\")" > "$shadow/vllm/v1/worker/gpu_worker.py"
PYTHONPATH=$shadow${PYTHONPATH:+:$PYTHONPATH} python3 -m grpo_portable train gsm8k-smollm2-135m --auto \
  --model SmolLM2-135M-Instruct.gguf --data gsm8k/train.jsonl --set eval_data=gsm8k/test.jsonl --set eval_limit=300 \
  --set bootstrap_epochs=0.1 --set prompts_per_step=8 --set steps=10 --out run
grep -q '"kind": "fallback"' run/events.jsonl && grep -q "half-updated installation" run/report.md && echo "it went on, and says why"
