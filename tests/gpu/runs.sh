# Sourced by the scripts of whole runs on GPUs. OUT: a folder for results; SMOLLM2: the GGUF file; GSM8K: train.jsonl and test.jsonl.
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
: "${OUT:?OUT names the folder for results}" "${GSM8K:?the folder with train.jsonl and test.jsonl}" "${SMOLLM2:?the GGUF file}"
GSM8K=$(realpath "$GSM8K") SMOLLM2=$(realpath "$SMOLLM2")
began=$SECONDS

results() {  # results FOLDER: results go to FOLDER ($TO from then on), runs are made in FOLDER/runs, which becomes the current folder
    mkdir -p "$1/logs" "$1/reports" "$1/runs"
    TO=$(cd "$1" && pwd)
    cd "$TO/runs" || exit 1
    ln -sfn "$GSM8K" gsm8k
    ln -sfn "$SMOLLM2" SmolLM2-135M-Instruct.gguf
}
note() { echo "$(( SECONDS - began )) s  $*" | tee -a "$TO/logs/summary.txt"; }

publish() {  # publish RUN: what reports/ keeps of a run; no adapter, no checkpoints
    local to="$TO/reports/$1" name
    [ -d "$1" ] || return 0
    mkdir -p "$to/generations"
    for name in events.jsonl facts.json metrics.jsonl plan.json recipe.yaml report.md run.json scores.json rung.json; do
        [ -f "$1/$name" ] && cp "$1/$name" "$to/"
    done
    [ -d "$1/charts" ] && cp -r "$1/charts" "$to/"
    for name in "$1"/generations/*.jsonl; do
        [ -f "$name" ] && gzip -n -c "$name" > "$to/generations/$(basename "$name").gz"
    done
    [ -f "$1/worker.log" ] && tail -c 200000 "$1/worker.log" > "$TO/logs/$1.worker.log"
    return 0
}
go() {  # go RUN SECONDS ARGUMENTS...: train, and publish what came of it
    local name=$1 limit=$2 code; shift 2
    note "$name starts"
    timeout -k 60 "$limit" python3 -m grpo_portable train "$@" --auto --out "$name" > "$TO/logs/$name.log" 2>&1
    code=$?
    note "$name ended with $code"
    [ $code = 0 ] || tail -n 15 "$TO/logs/$name.log"
    publish "$name"
}
