"""Pages of the walls of cards, FP8 and torch. Data only; `doctor.explain` puts them together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """`title` one line; `closes` in words; `what` it means; `rule` with its source; `do` what helps, most likely first."""

    title: str
    closes: str
    what: str
    rule: str
    do: tuple[str, ...]
    dont: str | None = None


ALL = "every path"
ALL_GPU = "every GPU path"
VLLM = "fp8-vllm, bf16-vllm, fp16-vllm"
NOTHING = "nothing; a warning"

CARDS = {
    "GPU-NONE": Page(
        "no GPU",
        ALL_GPU,
        "No NVIDIA or AMD card was found. The `cpu` path trains a small model with the same code; the "
        "built-in one takes minutes.",
        "Every path but `cpu` computes on a GPU.",
        (
            "Train on the CPU with a model of 100 to 500 million weights.",
            "Inside a container: start it with `--gpus all`.",
            "Compare cards to rent or buy: `grpo-doctor --what-if all --model MODEL`.",
        ),
        "Installing another torch build.",
    ),
    "GPU-INTEL": Page(
        "only an Intel GPU",
        ALL_GPU,
        "The GPU is Intel's. Torch has an XPU build, but the portable engine, bitsandbytes' 4-bit training "
        "and vLLM's GRPO sync are not proven on it here, so the machine is treated as a CPU machine.",
        "CUDA and ROCm are the two platforms the GPU paths are built on.",
        ("Use the `cpu` path.",),
    ),
    "GPU-APPLE": Page(
        "an Apple GPU",
        ALL_GPU,
        "Apple's GPU runs torch through MPS, which has no CUDA graphs, no FP8 and no vLLM. The `cpu` path "
        "runs on the same machine.",
        "MPS has no path of its own yet.",
        ("Use the `cpu` path; unified memory gives it room.",),
    ),
    "GPU-HIDDEN": Page(
        "CUDA_VISIBLE_DEVICES hides every card",
        ALL_GPU,
        "The variable is empty, -1 or a word that names no device, so CUDA shows torch none of the cards that "
        "are there.",
        "CUDA programming guide, environment variables.",
        ("`unset CUDA_VISIBLE_DEVICES`, or name a card by number.",),
    ),
    "GPU-BUSY": Page(
        "another program holds the card's memory",
        NOTHING + ", but less fits",
        "A good part of the memory is taken. The plan counts what is free, not what the card has; vLLM "
        "compares its share of the total with what is free and refuses to start when that is less.",
        "vLLM checks free >= gpu_memory_utilization x total at start (vllm#20305).",
        (
            "Stop the program: a dead engine's process is the usual holder.",
            "Use another card.",
            "Give vLLM a share of at most 0.9 x free / total.",
        ),
        "Waiting: memory of a stopped run is freed at once or never.",
    ),
    "GPU-UNIFIED": Page(
        "GPU and system share one memory",
        NOTHING,
        "On GB10, Jetson and GH200-like parts the GPU takes from the system's memory. NVML may answer N/A, "
        "which some tools read as zero; a share of it is no bound, and when it is exhausted the whole machine "
        "hangs instead of one program failing.",
        "On GB10 nvidia-smi answers N/A for memory, and a share of the total bounds nothing.",
        (
            "Leave the system a few GiB.",
            "Prefer small rollout chunks.",
        ),
    ),
    "GPU-MIG": Page(
        "a MIG slice",
        NOTHING,
        "The card is divided. Tools that ask NVML by index get the parent's memory; the doctor takes CUDA's "
        "figure, and no more than the slice's profile says.",
        "vLLM PR 41776.",
        ("Name the slice by number in CUDA_VISIBLE_DEVICES, not by UUID, where vLLM is used.",),
    ),
    "GPU-ORDER": Page(
        "different cards, counted two ways",
        NOTHING,
        "CUDA lists the fastest card first, NVML by slot. With cards of different kinds index 0 may then mean "
        "two cards, and a check of the weak one decides for the strong one: no error, ten times slower.",
        "vLLM PR 53834.",
        (
            "`export CUDA_DEVICE_ORDER=PCI_BUS_ID` before anything imports torch.",
            "Or show one card only: CUDA_VISIBLE_DEVICES.",
        ),
    ),
    "BF16-HARDWARE": Page(
        "no native bfloat16",
        "bf16-vllm, bf16-hf",
        "The card predates bfloat16 units (NVIDIA below 8.0: Pascal, Volta, Turing; AMD before gfx908). Torch "
        "reports support since 2.3 because it emulates; TRL switches bf16 on unless told otherwise; vLLM "
        "refuses.",
        "bf16 if and only if compute capability >= 8.0. vLLM offers bf16 only there (vllm/platforms/cuda.py).",
        ("Nothing: the fp16 paths and 4-bit LoRA with float16 compute are chosen by themselves.",),
        "bf16=True. Gemma 2 to 4 and gpt-oss overflow in float16: take another model on such a card.",
    ),
    "FP8-HARDWARE": Page(
        "no FP8 units",
        "fp8-vllm, fp8-hf",
        "FP8 E4M3 matrix units begin with Ada (8.9), Hopper (9.0) and Blackwell (10.x, 12.x). An A100 (8.0) "
        "or RTX 3090 (8.6) has none.",
        "(major, minor) >= (8, 9), compared as a pair: by major alone the L4 is misjudged (unsloth PR 10790).",
        ("Nothing: 16-bit or 4-bit weights are chosen.",),
        "vLLM's Marlin kernels store FP8 on older cards, which saves memory there and no time, and does not "
        "cover every model.",
    ),
    "FP8-AMD": Page(
        "no FP8 of the kind the paths use on this AMD card",
        "fp8-hf, and fp8-vllm before gfx94x",
        "MI300 (gfx94x), MI350 (gfx95x) and RDNA 4 (gfx12xx) have FP8, which vLLM uses; older AMD cards have "
        "none. The portable engine's FP8 copy is made for NVIDIA's E4M3.",
        "vllm/platforms/rocm.py, supports_fp8; MI300's variant is fnuz.",
        ("Nothing: 16-bit weights are chosen.",),
    ),
    "FP8-MATMUL": Page(
        "a small FP8 matmul failed",
        "fp8-vllm, fp8-hf",
        "The card passes the capability test and the library still has no working kernel for it. fbgemm's "
        "row-wise kernels, for one, are built for sm_90 and fail on 8.9, 10.0 and 12.0.",
        "One matmul in a child process decides (unsloth#3776, #3863, #3902).",
        (
            "Train in bfloat16.",
            "Install a torch, torchao and vLLM that belong together: `grpo-doctor --install-plan`.",
        ),
        "Another FP8 checkpoint.",
    ),
    "FP8-HF-UNPROVEN": Page(
        "FP8 without vLLM has not been measured to pay",
        "fp8-hf",
        "fp8-hf rolls out with an FP8 copy of the weights through torch's scaled matmul. At the row counts of "
        "a rollout, quantising the activations can cost more than the smaller weights save. The path is "
        "offered only on cards, and for models of a size, where it was measured to be faster than bf16-hf.",
        "Measured speed-ups stand in FP8_HF_MEASURED (doctor/walls_gpu.py).",
        ("Use bf16-hf or qlora-hf.",),
    ),
    "FP8-CUDA-129": Page(
        "FlashInfer wants CUDA 12.9 for this card",
        "fp8-vllm",
        "On SM 12.x (RTX 50, RTX PRO Blackwell, GB10) FlashInfer compiles its FP8 kernels at run time and "
        "refuses a toolkit below 12.9; its message then blames 'sm75'. It asks nvcc before torch: an old nvcc "
        "on PATH breaks a machine whose driver and torch are both CUDA 13.",
        "flashinfer/compilation_context.py. Order: CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda; "
        "torch.version.cuda only where none has nvcc. From 0.7.2 on 12.8 passes on SM 12.0 (PR 3633), not on "
        "12.1.",
        (
            "Install a toolkit >= 12.9 beside the old one and point CUDA_HOME at it.",
            "Or take the old nvcc off PATH and CUDA_HOME.",
            "bf16-vllm stays open with VLLM_USE_FLASHINFER_SAMPLER=0.",
        ),
        "A newer driver or torch while the old nvcc is found first.",
    ),
    "FP8-ON-THE-FLY": Page(
        "this vLLM does not quantise on the fly",
        NOTHING,
        "Before vLLM 0.12 an FP8 engine needs a checkpoint that is FP8 already.",
        "unsloth_zoo/vllm_utils.py.",
        ("Name an FP8 checkpoint, or upgrade vLLM.",),
    ),
    "NVCC-ABSENT": Page(
        "no nvcc",
        NOTHING,
        "FlashInfer compiles the sampler and some other kernels at vLLM's first start. Without nvcc that "
        "start fails in versions that do not fall back by themselves.",
        "vllm#49497; newer vLLM falls back for the sampler (PR 48956).",
        (
            "`export VLLM_USE_FLASHINFER_SAMPLER=0`.",
            "Or flashinfer-cubin of exactly flashinfer's version.",
        ),
    ),
    "NVCC-OLD": Page(
        "nvcc is too old for FlashInfer's flags",
        NOTHING,
        "An nvcc before 12.8 does not know flags that FlashInfer passes; one of an older major than torch "
        "cannot build against it.",
        "flashinfer#1532, #5479.",
        (
            "`export VLLM_USE_FLASHINFER_SAMPLER=0`.",
            "Or a toolkit of torch's CUDA version, named by CUDA_HOME.",
        ),
    ),
    "NVCC-NEWER": Page(
        "nvcc is newer than the driver",
        NOTHING,
        "What such an nvcc compiles, the driver may refuse: code of a higher major version always, PTX of a "
        "higher minor version too.",
        "vllm#22008; NVIDIA's CUDA compatibility guide.",
        (
            "`export VLLM_USE_FLASHINFER_SAMPLER=0`.",
            "Or a toolkit no newer than the driver's CUDA.",
        ),
    ),
}

TORCH = {
    "TORCH-ABSENT": Page(
        "torch is not installed",
        ALL,
        "Nothing can run yet. The doctor needs no torch itself and says what the machine becomes once the "
        "right set is installed.",
        "Every path trains with torch.",
        (
            "Run the install command of the wall: it names the build for this driver and card.",
            "`grpo-doctor --install-plan` prints the whole set for pip and uv.",
        ),
    ),
    "TORCH-IMPORT": Page(
        "torch is installed, but cannot be imported",
        ALL,
        "A child process that only imports torch raised or was killed: a missing or foreign library, a torn install, or "
        "code for instructions this processor does not have.",
        "Every path trains with torch, the CPU path too. The doctor itself never imports it.",
        (
            "Install torch again in a fresh environment, from the index that the wall names.",
            "Look at LD_LIBRARY_PATH and PYTHONPATH: another CUDA or another torch there is found first.",
        ),
        "A smaller model or another path.",
    ),
    "TORCH-SLOW": Page(
        "importing torch took too long to be waited for",
        NOTHING,
        "The child process that imports torch was ended after twice the time of a trial step; what would have come after "
        "it is unknown, and unknown never counts as no.",
        "A first import from a cold or network disk can take minutes.",
        ("Ask again with a longer --timeout; the second import is mostly faster.",),
    ),
    "TORCH-CPU-BUILD": Page(
        "torch is a CPU build",
        ALL_GPU,
        "A +cpu build has no CUDA code at all. PyPI gives it on Windows, gave it on aarch64 up to 2.9, and an "
        "install of another package may have pulled it in.",
        "torch's version tag, or torch's own 'not compiled with CUDA enabled'.",
        ("Reinstall from the index of the CUDA version the driver serves.",),
        "A newer driver or toolkit.",
    ),
    "TORCH-VENDOR": Page(
        "torch is built for another maker's cards",
        ALL_GPU,
        "A CUDA build drives NVIDIA cards, a ROCm build AMD cards, an XPU build Intel's.",
        "torch's version tag against the cards found.",
        ("Install the build for this card.",),
    ),
    "TORCH-DRIVER": Page(
        "the driver is too old for torch's CUDA",
        ALL_GPU,
        "torch is built with a newer major CUDA version than the driver serves. PyPI's torch is a CUDA 13 "
        "build from 2.11 on, which needs driver 580; a driver of the 570s serves CUDA 12.8.",
        "CUDA 12.x needs driver >= 525, CUDA 13.x >= 580 (NVIDIA's CUDA compatibility guide). A matmul that "
        "worked outranks the rule: data-centre cards can run newer CUDA through the forward-compatibility "
        "package.",
        (
            "Upgrade the driver: that of WSL2 in Windows, that of a container on its host.",
            "Or install a torch of the driver's CUDA: torch 2.10 from the cu128 index.",
        ),
        "A newer nvcc or toolkit.",
    ),
    "TORCH-ARCH": Page(
        "torch's wheel has no code for the card",
        ALL_GPU,
        "A wheel carries compiled code for a list of architectures. Code for X.y runs on X.z with z >= y, "
        "never across majors; code with suffix `a` on exactly its architecture. PTX (compute_) can be "
        "compiled by a driver at least as new as its compiler.",
        "sm_70 needs a CUDA 12.6 build (or torch <= 2.10 cu128); sm_100 and sm_120 need 12.8 or newer; sm_110 "
        "needs 13.0.",
        ("Install a wheel whose list has the card.",),
        "A newer driver or toolkit.",
    ),
    "TORCH-KERNEL": Page(
        "the torch in memory is not the torch on disk",
        NOTHING,
        "In a notebook an install swapped torch under the running kernel: what was imported before is old, "
        "what is imported next is new, and operators are missing.",
        "torch.__version__ against package metadata (unsloth notebooks PR 337).",
        ("Restart the runtime before the next import.",),
    ),
    "PTX-DRIVER": Page(
        "the driver is older than torch's CUDA, within one major",
        NOTHING,
        "Compiled code runs (minor-version compatibility). PTX and kernels compiled at run time do not: "
        "'runs' and 'can compile' are different. vLLM ships some kernels as PTX.",
        "vllm#31700; 12.4 wants driver 550, 12.6 560, 12.8 570, 12.9 575, 13.0 580, 13.1 590, 13.2 595.",
        ("Upgrade the driver if vLLM fails at its first kernel.",),
    ),
    "CUDA-804": Page(
        "error 804: forward compatibility on a card that has none",
        ALL_GPU,
        "The container brings a newer libcuda for data-centre cards, and this is a GeForce or workstation card.",
        "gpustack#1254.",
        (
            "Upgrade the host's driver to the image's CUDA version.",
            "Or an image of the driver's CUDA version.",
            "Or keep /usr/local/cuda/compat off the library path.",
        ),
        "Reinstalling torch.",
    ),
    "CUDA-802": Page(
        "error 802: NVSwitch without its fabric manager",
        ALL_GPU,
        "On HGX and DGX boards CUDA starts only when nvidia-fabricmanager of exactly the driver's version runs.",
        "pytorch#35710.",
        (
            "Start it on the host.",
            "In a rented container: take another machine, the provider must fix it.",
        ),
    ),
    "CUDA-803": Page(
        "error 803: driver and CUDA library do not match",
        ALL_GPU,
        "libcuda and the loaded kernel module are of different releases.",
        "cudaErrorSystemDriverMismatch.",
        (
            "Reboot.",
            "In a container: remove the libcuda that came with the image.",
        ),
    ),
    "CUDA-MISMATCH": Page(
        "the driver was updated under the running system",
        ALL_GPU,
        "The libraries are new, the kernel module is old.",
        "NVML error 18.",
        ("Reboot.",),
    ),
    "CUDA-NO-DRIVER": Page(
        "no working NVIDIA driver",
        ALL_GPU,
        "There is a card, but no driver answers, or the container was not given it.",
        "CUDA needs libcuda.so.1 and /dev/nvidia*.",
        (
            "Container: `--gpus all` and the NVIDIA container toolkit.",
            "Host: install or load the driver.",
        ),
    ),
    "CUDA-OUT-OF-MEMORY": Page(
        "no memory even to start CUDA",
        ALL_GPU,
        "Others hold nearly all of the card.",
        "A CUDA context takes some 0.5 GiB.",
        ("Stop what holds it.",),
    ),
    "CUDA-BUSY": Page(
        "the card is in exclusive use",
        ALL_GPU,
        "Another process owns the card.",
        "Compute mode EXCLUSIVE_PROCESS gives error 46.",
        ("Stop the process, or set compute mode DEFAULT.",),
    ),
    "CUDA-UNKNOWN-999": Page(
        "error 999: the driver is in a bad state",
        ALL_GPU,
        "Usually after sleep: nvidia_uvm lost its state.",
        "pytorch#49540.",
        ("Reload nvidia_uvm, or reboot.",),
    ),
    "CUDA-NO-KERNEL": Page(
        "no kernel image for this card",
        ALL_GPU,
        "torch started, and its first kernel has no code for the card. As TORCH-ARCH, seen in the trial.",
        "See TORCH-ARCH.",
        ("Install a wheel whose arch list has the card's sm_.",),
    ),
    "CUDA-PTX": Page(
        "the driver cannot compile this build's PTX",
        ALL_GPU,
        "The kernel exists as PTX only, and the driver is older than its compiler.",
        "NVIDIA's CUDA compatibility guide.",
        ("Upgrade the driver.",),
    ),
    "CUDA-LIBRARY": Page(
        "torch does not load",
        ALL_GPU,
        "A CUDA, cuDNN or NCCL library is missing or of another version, often named by LD_LIBRARY_PATH.",
        "Each torch wheel needs the nvidia-* wheels of its own metadata.",
        (
            "Reinstall torch in a fresh environment.",
            "Unset LD_LIBRARY_PATH.",
        ),
    ),
    "CUDA-FAILED": Page(
        "torch's first computation on the GPU failed",
        ALL_GPU,
        "The text is not one the doctor knows; it stands in the wall.",
        "One small matmul, checked against the CPU.",
        (
            "Repeat it by hand for the whole traceback.",
            "Install a matching set.",
        ),
    ),
}
