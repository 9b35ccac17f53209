"""Pages of the walls of bitsandbytes, the rest of the stack, models and proofs. Data only."""

from __future__ import annotations

from doctor.pages import ALL, NOTHING, Page

_SET = "`grpo-doctor --install-plan` names a set that belongs together."

STACK = {
    "BNB-ABSENT": Page(
        "bitsandbytes is not installed",
        "qlora-hf",
        "4-bit weights are its.",
        "QLoRA, arXiv 2305.14314.",
        ('`pip install "bitsandbytes>=0.49"`.',),
    ),
    "BNB-FAILED": Page(
        "bitsandbytes' first 4-bit product failed",
        "qlora-hf",
        "The import works everywhere; the native code is loaded at the first call. One library per CUDA "
        "version, certain architectures, no JetPack.",
        "bitsandbytes#1848; its installation page.",
        (
            "Upgrade it.",
            "`export BNB_CUDA_VERSION=130` to take a near library.",
            "`python -m bitsandbytes` shows what it finds.",
        ),
    ),
    "BNB-BUILD": Page(
        "bitsandbytes may lack code for this card",
        NOTHING,
        "Not tried yet; its wheels cover certain architectures.",
        "6.0 and newer; CUDA 13 builds 7.5 and newer.",
        ("Let the doctor try it.",),
    ),
    "UNSLOTH-IMPORT": Page(
        "Unsloth cannot be imported",
        NOTHING,
        "No path needs it; its own backend does.",
        "The import in a child process.",
        (
            "Go on without it.",
            _SET,
        ),
    ),
    "STACK-INCOMPLETE": Page(
        "training packages are missing",
        ALL,
        "transformers, trl, peft, accelerate or datasets is absent.",
        "Every path trains with them.",
        (
            "Install them.",
            _SET,
        ),
    ),
    "STACK-RANGE": Page(
        "training packages are older or newer than this project's",
        NOTHING,
        "A package is outside the range that grpo-portable asks for: the trainer may fail on a path that works.",
        "pyproject.toml.",
        (
            "Install the ranges named.",
            _SET,
        ),
    ),
    "TRL-TRITON": Page(
        "this TRL trains with Triton alone",
        ALL,
        "TRL 1.15 has its loss in Triton only, which torch for the CPU, macOS or Windows does not bring: the first step fails. "
        "An evaluation runs all the same.",
        "Read in TRL 1.15 and 1.16; a step of 1.15 without Triton was tried.",
        ("Upgrade TRL.",),
    ),
    "PYTHON-RANGE": Page(
        "this Python is out of range",
        NOTHING,
        "grpo-portable and current TRL need 3.11 to 3.14.",
        "Released metadata.",
        ("`uv venv --python 3.12`.",),
    ),
    "SHM-SMALL": Page(
        "/dev/shm is small",
        NOTHING,
        "NCCL between several GPUs wants shared memory; Docker gives 64 MB.",
        "vllm#789.",
        (
            "One GPU needs none.",
            "`docker run --ipc=host` or `--shm-size=8g`.",
        ),
    ),
    "NCCL-ABSENT": Page(
        "torch has no NCCL",
        NOTHING,
        "Several NVIDIA GPUs bring their gradients together through NCCL, which torch has on Linux only. One GPU needs none.",
        "torch.distributed.is_nccl_available.",
        (
            "One GPU: the plan takes the best.",
            "Linux or WSL2 with a CUDA build of torch.",
        ),
    ),
    "GPU-PEERS": Page(
        "the cards cannot read each other's memory",
        NOTHING,
        "What goes between the cards takes the way through the host's memory: GeForce cards from Ada on, an IOMMU, ACS.",
        "torch.cuda.can_device_access_peer; NCCL's user guide, troubleshooting.",
        (
            "Nothing for LoRA, whose gradients are small.",
            "Should NCCL hang: `export NCCL_P2P_DISABLE=1`.",
        ),
    ),
    "GPU-NVLINK": Page(
        "some cards are joined by NVLink and others are not",
        NOTHING,
        "NCCL takes the slowest way between any two of the cards for all of them.",
        "NVML, nvmlDeviceGetNvLinkState.",
        (
            "Choose the joined ones with `--gpus`.",
            "`nvidia-smi nvlink -s`; on NVSwitch machines the fabric manager.",
        ),
    ),
    "HUB-OFFLINE": Page(
        "the hub is switched off",
        NOTHING,
        "HF_HUB_OFFLINE is set: only the local cache counts.",
        "huggingface_hub.",
        ("Name a local folder, or unset it.",),
    ),
    "CC-ABSENT": Page(
        "no C compiler",
        NOTHING,
        "Triton compiles launchers with one.",
        "Triton.",
        ("`sudo apt-get install build-essential python3-dev`.",),
    ),
    "MODEL-QUANTISED": Page(
        "a 4-bit checkpoint for a vLLM path",
        NOTHING,
        "A trained adapter cannot be merged into packed 4-bit weights: shapes differ, or the update is rounded away.",
        "trl#4973, peft#2501.",
        ("Name the 16-bit checkpoint.",),
    ),
    "MODEL-GGUF": Page(
        "a GGUF file without the package that reads it",
        ALL,
        "transformers reads a GGUF file with the package gguf.",
        "The import in transformers.",
        ('`pip install "gguf>=0.17"`.',),
    ),
    "MODEL-CPU": Page(
        "a model that is too large to train on a CPU",
        NOTHING,
        "It has room there, but beyond half a billion parameters a run takes days to weeks. `grpo-portable train` refuses it "
        "unless `--path cpu` insists.",
        "A judgement, by the estimates of `grpo-portable train --dry-run`.",
        ("Name a smaller model.",),
    ),
    "MODEL-FLOAT16": Page(
        "a model that overflows in float16",
        "fp16-vllm, fp16-hf, qlora-hf, on cards without bfloat16",
        "Gemma 2 to 4 and gpt-oss exceed 65504 in places.",
        "unsloth PR 5880.",
        ("Take another model on cards without bfloat16.",),
    ),
    "PROOF-ATTENTION": Page(
        "attention failed in the proof",
        "the portable GPU paths",
        "torch's attention failed or answered wrong on a tiny decode step.",
        "`grpo-doctor --prove`.",
        (_SET,),
    ),
    "PROOF-LORA": Page(
        "a LoRA step failed in the proof",
        "every GPU path with a 16-bit base",
        "Three tiny updates failed on this GPU.",
        "`grpo-doctor --prove`.",
        (_SET,),
    ),
    "PROOF-QLORA": Page(
        "an NF4 LoRA step failed in the proof",
        "qlora-hf",
        "Three tiny updates on a 4-bit base failed.",
        "`grpo-doctor --prove`.",
        ("Upgrade bitsandbytes.",),
    ),
    "PROOF-CPU": Page(
        "a LoRA step failed on the CPU",
        "cpu",
        "The installed packages do not work together.",
        "`grpo-doctor --prove`.",
        (_SET,),
    ),
    "PROOF-GRAPH": Page(
        "no CUDA graph",
        NOTHING + "; decoding is slower",
        "A graph could not be captured and replayed.",
        "`grpo-doctor --prove`.",
        (_SET,),
    ),
}
