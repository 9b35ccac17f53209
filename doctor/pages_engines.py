"""Pages of the walls of vLLM and of version locks. Data only; `doctor.explain` puts them together."""

from __future__ import annotations

from doctor.pages import NOTHING, VLLM, Page

_SET = "`grpo-doctor --install-plan` names a set that belongs together."
_PORTABLE = "The portable engine needs no vLLM: bf16-hf, fp16-hf and qlora-hf stay open."

ENGINES = {
    "VLLM-ABSENT": Page(
        "vLLM is not installed",
        VLLM,
        "Rollouts then run in the portable engine. The wall says which release would fit and what shuts the "
        "newer ones out: driver, card, Python, glibc, or what trl and unsloth declare.",
        "PyPI's vLLM is a CUDA 13 build from 0.20 on and needs driver 580; each release pins one torch.",
        (
            "Install the release the wall names.",
            "On a 12.x driver: upgrade it, or take a cu129 wheel of vLLM's own.",
            _PORTABLE,
        ),
    ),
    "VLLM-WINDOWS": Page(
        "vLLM on Windows",
        VLLM,
        "vLLM supports Linux. A pip install on Windows leaves a package without compiled code, beside which "
        "other libraries fail.",
        "vllm#32738.",
        (
            "Train inside WSL2, which counts as Linux.",
            _PORTABLE,
        ),
        "pip install vllm on Windows.",
    ),
    "VLLM-MACOS": Page(
        "vLLM on macOS",
        VLLM,
        "vLLM on a Mac is a CPU engine.",
        "vLLM docs.",
        (_PORTABLE,),
    ),
    "VLLM-IMPORT": Page(
        "vLLM cannot be imported",
        VLLM,
        "The import, or its compiled extension, fails in a child process. The wall names the package at fault "
        "where the text shows it. A bare `import vllm` may succeed while the extension is broken.",
        "The extension is loaded by name.",
        (
            _SET,
            _PORTABLE,
        ),
    ),
    "VLLM-GLIBC": Page(
        "the C library is too old",
        VLLM,
        "The wheel was compiled on a newer system than this one; its tag may promise less than it needs.",
        "0.20.0+cu129 is tagged glibc 2.31 and needs 2.34 (vllm#41103).",
        (
            "A container or system with a newer glibc.",
            "Another vLLM release.",
        ),
        "Copying a newer libc.so.6.",
    ),
    "VLLM-NUMPY": Page(
        "numpy of the wrong generation",
        VLLM,
        "Something compiled for numpy 1 meets numpy 2, or the other way round.",
        "numpy's binary interface changed with 2.0.",
        (
            "Install the numpy generation vLLM was built with.",
            _SET,
        ),
    ),
    "VLLM-HUSK": Page(
        "vLLM without its compiled code",
        VLLM,
        "A wheel of another platform, or a source tree that was not built.",
        "vllm._C is missing.",
        ("Reinstall from a wheel for this platform.",),
    ),
    "VLLM-CUDA-LIBRARY": Page(
        "vLLM was compiled for another CUDA",
        VLLM,
        "It looks for libcudart.so.13 (or .12) and torch brings the other.",
        "open-instruct PR 1874; vllm#42756.",
        ("Take both for one CUDA version.",),
        "A symbolic link between versions.",
    ),
    "VLLM-TORCHVISION": Page(
        "torchvision or torchaudio of another torch",
        VLLM,
        "Installing vLLM swapped torch under them ('operator torchvision::nms does not exist').",
        "Each is compiled for one torch.",
        (
            "Reinstall them together.",
            "In a notebook: restart after installing.",
        ),
    ),
    "VLLM-ABI": Page(
        "compiled for another torch",
        VLLM,
        "'undefined symbol': an extension meets a torch it was not built with.",
        "Extensions fit one torch minor version.",
        (_SET,),
        "Reinstalling vLLM with --no-deps.",
    ),
    "VLLM-START": Page(
        "vLLM imports, but does not start",
        VLLM,
        "A start on a tiny model failed with a text the doctor does not know. What an option or memory "
        "explains is told apart (VLLM-OPTION, VLLM-MEMORY) and closes nothing.",
        "`grpo-doctor --prove` makes the trial.",
        (
            "Read the whole log.",
            _SET,
            _PORTABLE,
        ),
    ),
    "VLLM-PTX": Page(
        "vLLM's PTX is newer than the driver",
        VLLM,
        "torch works, vLLM imports, and the first attention kernel dies: it ships as PTX, which the driver "
        "must compile.",
        "vllm#31700.",
        (
            "Upgrade the driver.",
            "Data-centre cards: the forward-compatibility package.",
            "An older vLLM.",
        ),
        "A newer torch or nvcc.",
    ),
    "VLLM-PTXAS": Page(
        "Triton's assembler does not know this card",
        VLLM,
        "Triton brings a ptxas of the day it was built. On a card that is newer, its kernels cannot be assembled: "
        "'Value sm_121a is not defined', 'PassManager::run failed'.",
        "Triton reads TRITON_PTXAS_PATH.",
        ("`export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas` with a toolkit that knows the card.", _SET),
        "enforce_eager.",
    ),
    "VLLM-MIG": Page(
        "vLLM cannot read a device's UUID",
        VLLM,
        "CUDA_VISIBLE_DEVICES names a MIG slice or a card by UUID, and vLLM parses a number.",
        "vllm#41848.",
        ("Name it by number.",),
    ),
    "VLLM-TRANSFORMERS": Page(
        "transformers of another age than vLLM",
        VLLM,
        "vLLM calls what transformers renamed or removed, or the other way round. Old vLLM declares no upper "
        "bound, so pip brings a transformers 5 it cannot use.",
        "verl#4337; vLLM takes transformers 5 from 0.19.1 on.",
        ("Install the transformers that this vLLM was released with.",),
    ),
    "VLLM-NO-KERNEL": Page(
        "vLLM has no kernel for this card",
        VLLM,
        "The card is below what the wheel was built for.",
        "7.0 up to about 0.19, then 7.5 (vLLM PR 39878).",
        (_PORTABLE,),
    ),
    "VLLM-GPU-TOO-OLD": Page(
        "vLLM refuses the card as too old",
        VLLM,
        "As VLLM-NO-KERNEL, said by vLLM or Unsloth itself.",
        "7.0 or 7.5.",
        (_PORTABLE,),
    ),
    "VLLM-CAPABILITY": Page(
        "the card is below every vLLM's minimum",
        VLLM,
        "No release was made for a capability below 7.0 (Pascal and older).",
        "vLLM docs.",
        (_PORTABLE,),
    ),
    "VLLM-CARD-AGE": Page(
        "the card may be below this vLLM's minimum",
        NOTHING,
        "Volta (7.0) was dropped with the move to CUDA 13; only a start tells.",
        "vLLM PR 39878.",
        ("`grpo-doctor --prove`.",),
    ),
    "VLLM-DEVICE": Page(
        "vLLM does not recognise the GPU",
        VLLM,
        "vLLM asks NVML which platform it is on. An old pynvml package that shadows nvidia-ml-py, or a CPU build of torch, "
        "leaves it without an answer.",
        "'Failed to infer device type', 'is_async_output_supported is not implemented' (trl#2816).",
        ("Remove pynvml and install nvidia-ml-py.", _SET),
    ),
    "VLLM-COMPILER": Page(
        "vLLM's start needs a C compiler",
        VLLM,
        "Triton compiles a launcher for each kernel.",
        "'Failed to find C compiler', 'Python.h'.",
        ("`sudo apt-get install build-essential python3-dev`.",),
        "enforce_eager.",
    ),
    "VLLM-MEMORY": Page(
        "vLLM's start was refused for memory",
        NOTHING + "; vLLM paths count as not fitting",
        "Its share of the card's total was more than is free, or its KV cache found no room.",
        "vllm#20305.",
        (
            "Free the card.",
            "A share below free / total; shorter sequences.",
        ),
    ),
    "VLLM-OPTION": Page(
        "vLLM's start failed over something an option changes",
        NOTHING,
        "The wall names the option: dtype float16 on Turing, the older engine, prefix caching off, the native "
        "sampler, one GPU, 16-bit weights.",
        "What an option explains is no inability of the machine.",
        ("Set the option the wall names.",),
    ),
    "VLLM-FP8-START": Page(
        "vLLM does not start with FP8 weights",
        "fp8-vllm",
        "A start with quantization=fp8 on a tiny model failed, as `grpo-doctor --prove` tries it.",
        "The trial.",
        ("bf16-vllm, where it is open.",),
    ),
    "VLLM-OLD": Page(
        "vLLM older than any TRL of these days",
        NOTHING,
        "No TRL from 0.24 on accepts a vLLM below 0.10.2.",
        "Released metadata.",
        (_SET,),
    ),
    "LOCK-TRL-VLLM": Page(
        "trl was made for other vLLM releases",
        VLLM,
        "TRL declares the vLLM range it was written for and imports vLLM's names at module level. Outside the "
        "range an import may fail even where vLLM is never used (GuidedDecodingParams went with vLLM 0.12). "
        "Newer TRL only warns, but is as untested.",
        "trl's metadata, extra `vllm`; trl#4617. Local tags are left out: 0.20.0+cu129 counts as 0.20.0.",
        (
            "The one command of the wall.",
            _SET,
            "Or uninstall vLLM and use the portable engine.",
        ),
    ),
    "LOCK-VLLM": Page(
        "vLLM's own pins are not met",
        NOTHING,
        "vLLM pins one torch and a range of transformers. Not met, and nothing has tried an import or start yet.",
        "vLLM's metadata.",
        (
            "The one command of the wall.",
            _SET,
        ),
    ),
    "LOCK-UNSLOTH": Page(
        "Unsloth and the installed packages exclude each other",
        NOTHING,
        "unsloth and unsloth_zoo cap torch, trl, transformers and datasets, and unsloth needs a zoo of at "
        "least its own date.",
        "Their metadata. 2026.10.9: torch < 2.15, trl <= 1.15.0, transformers <= 5.17.0, datasets < 5.",
        (
            "The one command of the wall.",
            _SET,
        ),
        "Upgrading one of them alone.",
    ),
    "LOCK-UNSLOTH-VLLM": Page(
        "Unsloth and vLLM have no version of a third package in common",
        NOTHING,
        "Say unsloth wants torch < 2.11 and vLLM pins torch 2.11.0: whichever is installed, one is broken.",
        "Both packages' metadata.",
        ("Upgrade or downgrade one of the two, as the wall says.",),
        "Another version of the third.",
    ),
    "LOCK-TORCHAO": Page(
        "torchao was built for another torch",
        NOTHING,
        "Its compiled kernels are skipped with one warning line. It matters for torchao's FP8 and int8 kernels only.",
        "0.12 to torch 2.7, 0.13 to 2.8, 0.14 to 2.9, 0.15/0.16 to 2.10, 0.17 to 2.11, 0.18 to 2.11 and newer "
        "(ao#2919).",
        ("Install the torchao of the installed torch.",),
    ),
    "LOCK-OTHER": Page(
        "installed packages disagree",
        NOTHING,
        "One package's declared need is not met by what is installed.",
        "Package metadata.",
        (
            "The one command of the wall.",
            _SET,
        ),
    ),
    "PAIR-ZOO-WARMUP": Page(
        "vLLM's LoRA warm-up meets an older unsloth_zoo",
        VLLM + ", where a start failed so; otherwise a warning",
        "vLLM >= 0.21 calls get_dummy_lora_warmup_rank on a manager that unsloth_zoo replaced with its own "
        "older class.",
        "unsloth PR 6496: fixed in zoo 2026.6.6; unsloth then asks for 2026.6.7.",
        (
            "Upgrade unsloth and its zoo together.",
            "Or go without Unsloth's engine.",
        ),
    ),
    "PAIR-TOOL-MASK": Page(
        "unsloth and its zoo are of different ages",
        NOTHING + ", unless vLLM's start failed so",
        "NameError: align_completion_tool_mask in GRPO's loss. unsloth pins its zoo from below only, so a "
        "later zoo slips in.",
        "unsloth PR 5682, unsloth-zoo PR 688 (late May 2026).",
        ("Bring both to one month.",),
    ),
}
