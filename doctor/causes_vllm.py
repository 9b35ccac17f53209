"""What a failed import or start of vLLM means, by its text.

`closes` says what the failure proves: "all" the vLLM paths as they stand; "fp8" only FP8; "memory" and "option" nothing,
since a smaller share, another dtype or a variable explains it. Order matters: the first text that fits tells the cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from doctor.diagnosis import Help
from doctor.walls_locks import TRL_AGE, zoo_helps

_SET = Help("Install a set that belongs together, in a fresh environment", "grpo-doctor --install-plan", "likely")


@dataclass(frozen=True)
class Cause:
    """One known text. In `fact`, {1} stands for what the pattern's first group caught; `stage`: import, start or any."""

    code: str
    stage: str
    pattern: re.Pattern[str]
    fact: str
    rule: str
    helps: tuple[Help, ...]
    closes: str = "all"
    wont_help: str | None = None


def _cause(
    code: str,
    stage: str,
    pattern: str,
    fact: str,
    rule: str,
    *helps: Help,
    closes: str = "all",
    wont_help: str | None = None,
) -> Cause:
    return Cause(code, stage, re.compile(pattern, re.IGNORECASE), fact, rule, helps or (_SET,), closes, wont_help)


def _option(
    pattern: str, fact: str, rule: str, *helps: Help, code: str = "VLLM-OPTION", closes: str = "option"
) -> Cause:
    return _cause(code, "start", pattern, fact, rule, *helps, closes=closes)


_NO_SAMPLER = Help("Use vLLM's own sampler, which needs no compiler", "export VLLM_USE_FLASHINFER_SAMPLER=0", "certain")

CAUSES = (
    _cause(
        "VLLM-GLIBC",
        "any",
        r"(GLIBC(?:XX)?_[\d.]+)'? not found|manylinux_(2_\d+)|libstdc\+\+\.so.*version",
        "vLLM's compiled code needs a newer C library (glibc) than this system has",
        "a wheel built on a newer system asks for its symbols, whatever its tag says (vllm#41103)",
        Help("Use a container or system with a newer glibc: Ubuntu 22.04, Debian 12, RHEL 9 or later", None, "certain"),
        Help("Or a vLLM release built on an older base: wheels from 0.22 on are tagged glibc 2.28", None, "try"),
        wont_help="Reinstalling the same wheel, or copying a newer libc.so.6 into place",
    ),
    _cause(
        "VLLM-NUMPY",
        "import",
        r"numpy\.(?:_?core|dtype|ndarray|ufunc|random)|_ARRAY_API|numpy 1\.x cannot|compiled using numpy|multiarray|"
        r"no attribute 'bool8'|np\.\w+ was removed|numpy.* size changed",
        "numpy is of another generation than what was compiled against it: numpy keeps vLLM from importing",
        "code compiled for numpy 1 does not load under numpy 2 without a rebuild, and the other way round",
        Help("Install a numpy of the generation that vLLM was built with", 'pip install "numpy<2"', "try"),
        _SET,
    ),
    _cause(
        "VLLM-HUSK",
        "import",
        r"without its compiled code|no module named '?vllm\._|cannot import name '_C'.*vllm|"
        r"failed to import from vllm\._C with modulenotfound",
        "vllm is installed without its compiled code",
        "a wheel for another platform, or a source install without a build, leaves a husk (vllm#32738)",
        Help(
            "Reinstall vLLM from a wheel made for this platform", "pip install --force-reinstall --no-deps vllm", "try"
        ),
        _SET,
    ),
    _cause(
        "PAIR-ZOO-WARMUP",
        "any",
        r"get_dummy_lora_warmup_rank",
        "unsloth_zoo is older than this vLLM: its LoRA manager lacks what vLLM's warm-up calls at the start",
        "vLLM >= 0.21 calls get_dummy_lora_warmup_rank; unsloth_zoo has it from 2026.6.6 on (unsloth PR 6496)",
        *zoo_helps(),
        wont_help="Changing trl, transformers or torch",
    ),
    _cause(
        "LOCK-TRL-VLLM",
        "any",
        TRL_AGE.pattern,
        "trl and vLLM are of different ages: trl asks vLLM for something that this release does not have",
        "TRL up to 0.25 imports GuidedDecodingParams, gone with vLLM 0.12, used or not (trl#4617); TRL from 0.16 on passes "
        "worker_extension_cls, new with vLLM 0.8 (trl#3304)",
        Help("Upgrade trl to a release whose range has this vLLM", "grpo-doctor --install-plan", "certain"),
        Help("Or remove vLLM and train without it", "pip uninstall -y vllm", "certain"),
    ),
    _cause(
        "PAIR-TOOL-MASK",
        "any",
        r"align_completion_tool_mask",
        "unsloth and unsloth_zoo are of different ages: the loss calls align_completion_tool_mask, which nobody wrote",
        "the tool mask came to both in late May 2026 (unsloth PR 5682, unsloth-zoo PR 688)",
        *zoo_helps(),
    ),
    _cause(
        "VLLM-MIG",
        "any",
        r"invalid literal for int\(\).*(MIG|GPU)-",
        "vLLM cannot start on a device named by its UUID ({1}): it reads the name as a number",
        "device ids are parsed as integers; a MIG slice must be named by index (vllm#41848)",
        Help("Name the device by number", "export CUDA_VISIBLE_DEVICES=0", "likely"),
        wont_help="Another gpu_memory_utilization",
    ),
    _cause(
        "VLLM-PTXAS",
        "any",
        r"ptxas.*sm_\d+\w?.*(?:not defined|not recognized|unsupported)|"
        r"sm_\d+a?'? is not a recognized processor|PassManager::run failed",
        "vLLM's start fails because Triton's own assembler (ptxas) does not know this card",
        "Triton brings a ptxas of its build time; a card newer than that needs a newer one (triton, TRITON_PTXAS_PATH)",
        Help("Let Triton use the toolkit's", "export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas", "likely"),
        _SET,
        wont_help="enforce_eager: sampling and LoRA use Triton as well",
    ),
    _cause(
        "VLLM-PTX",
        "any",
        r"unsupported toolchain|provided PTX|UnsupportedPtxVersion|ptxas (?:fatal|error)|unsupported \.version",
        "The driver is older than the compiler of vLLM's PTX: vLLM's start failed at the first kernel that is PTX",
        "minor-version compatibility covers compiled code, not PTX: that needs a driver of the compiler's CUDA (vllm#31700)",
        Help(
            "Upgrade the driver to the CUDA version vLLM was built with: 570 for 12.8, 575 for 12.9, 580 for 13.0",
            None,
            "certain",
        ),
        Help(
            "On data-centre cards the forward-compatibility package does too",
            "sudo apt-get install cuda-compat-12-9",
            "likely",
        ),
        wont_help="A newer torch or nvcc: the driver compiles PTX",
    ),
    _cause(
        "VLLM-TRANSFORMERS",
        "any",
        r"all_special_tokens_extended|is already used by a Transformers config|from '?transformers|transformers[._]\w+ import|"
        r"module '?transformers|AutoModelForVision2Seq|Transformers? version|no attribute 'rope_theta'|in transformers",
        "transformers is of another age than this vLLM, which calls what it renamed or removed",
        "vLLM up to 0.18 is written for transformers 4, and its own pins let 5 in up to 0.11.0 (verl#4337)",
        Help("Install a transformers that this vLLM was released with", "grpo-doctor --install-plan", "likely"),
    ),
    _cause(
        "VLLM-CUDA-LIBRARY",
        "any",
        r"lib(?:cudart|cublas|cublasLt|nvrtc|cudnn|cusparse|cusparseLt|cufft|curand|nvJitLink|cupti)[\w-]*\.so\.(\d+)",
        "vLLM was compiled for CUDA {1}, whose libraries this environment's torch does not bring",
        "PyPI's vLLM is a CUDA 13 build from 0.20 on, and finds no libcudart.so.13 beside a CUDA 12 torch (vllm#42756)",
        Help("Take vLLM and torch built for one CUDA version", "grpo-doctor --install-plan", "likely"),
        wont_help="A symbolic link from one library version to another",
    ),
    _cause(
        "VLLM-TORCHVISION",
        "any",
        r"(torchvision|torchaudio)(?:::|\b)",
        "{1} and torch do not belong together: vLLM imports both, and torch cannot load its operators",
        "each torchvision and torchaudio is compiled for one torch; installing vLLM may have swapped torch under them",
        Help("Reinstall them together", "pip install --force-reinstall torchvision torchaudio", "try"),
        _SET,
        wont_help="Restarting alone, unless torch was swapped under a running notebook kernel",
    ),
    _cause(
        "VLLM-ABI",
        "any",
        r"undefined symbol|symbol not found|symbol lookup|operator \w+::\w+ does not exist|_ZN\w+",
        "vLLM, or a library it loads, was compiled for another torch than the one installed",
        "compiled extensions fit the torch they were built with, to the minor version",
        _SET,
        wont_help="Reinstalling vLLM alone with --no-deps",
    ),
    _cause(
        "VLLM-NO-KERNEL",
        "start",
        r"no kernel image|device kernel image is invalid|invalid device function|NoBinaryForGpu",
        "vLLM starts and finds no kernel for this card: it is below what this vLLM was built for",
        "vLLM's minimum is compute capability 7.0 up to about 0.19, and 7.5 from its move to CUDA 13 on (vLLM PR 39878)",
        Help("Generate with the portable engine: the plan does", None, "certain"),
        wont_help="Any option of vLLM: the code is not in the wheel",
    ),
    _cause(
        "VLLM-GPU-TOO-OLD",
        "start",
        r"too old|capability below 7|compute capability (?:of )?(?:at least )?7\.0|requires compute capability 7",
        "vLLM refuses this card's start: its compute capability is too low",
        "vLLM and Triton need 7.0, newer vLLM 7.5 (vLLM docs; unsloth_zoo/vllm_utils.py)",
        Help("Generate with the portable engine: the plan does", None, "certain"),
    ),
    _cause(
        "VLLM-DEVICE",
        "any",
        r"failed to infer device type|is_async_output_supported|unspecified platform|no platform detected",
        "vLLM does not recognise the GPU's platform",
        "it asks NVML; an old pynvml package shadows nvidia-ml-py, or torch is a CPU build (trl#2816)",
        Help("Let nvidia-ml-py answer", "pip uninstall -y pynvml && pip install nvidia-ml-py", "likely"),
        _SET,
    ),
    _cause(
        "VLLM-COMPILER",
        "start",
        r"failed to find c compiler|Python\.h|cannot find -l(?:cuda|python)|gcc.*(?:not found|failed)|command 'gcc'",
        "vLLM's start needs a C compiler and Python's headers for Triton, and does not find them",
        "Triton compiles a small launcher for each kernel with the system's C compiler",
        Help("Install them", "sudo apt-get install -y build-essential python3-dev", "certain"),
        wont_help="enforce_eager: sampling and LoRA use Triton as well",
    ),
    _cause(
        "VLLM-MEMORY",
        "start",
        r"free memory on device|no available memory for the cache|out of memory|OutOfMemory|KV cache is needed|"
        r"larger than the (?:available|maximum)"
        r"|memory profiling|estimated maximum model length|insufficient memory|"
        r"try increasing .?gpu_memory_utilization|alloc_failed",
        "vLLM's start was refused for want of free memory",
        "vLLM takes its share of the card's total at once and checks it against what is free (vllm#20305)",
        Help("Free the card, or give vLLM a share below what is free", None, "certain"),
        closes="memory",
        wont_help="Raising gpu_memory_utilization above free / total",
    ),
    _option(
        r"fp8e4nv|fp8.*(?:is not supported|not supported for)|quantization.*not supported for the current GPU|scaled_mm",
        "vLLM's start failed over FP8 weights",
        "FP8 needs capability 8.9; other weights are not concerned (vllm#17581)",
        Help("Start it with 16-bit weights", None, "certain"),
        closes="fp8",
    ),
    _option(
        r"bfloat16 is only supported|bfloat16.*compute capability|use float16 instead",
        "vLLM's start failed because the checkpoint's bfloat16 was asked of a card without it",
        "vLLM offers bf16 from capability 8.0 on; dtype=auto follows the checkpoint",
        Help("Ask for float16: `--dtype half`, dtype='float16'; the fp16 paths do", None, "certain"),
    ),
    _option(
        r"mma -> mma|prefix.?caching|layout conversion is only supported",
        "vLLM's start failed in a prefix-caching kernel that this card does not have",
        "a Triton kernel of those versions was written for Ampere (trl#2798)",
        Help("Switch prefix caching off: enable_prefix_caching=False", None, "certain"),
    ),
    _option(
        r"VLLM_USE_V1|no attribute 'model_executor'|\bV1\b.*(?:not supported|only support|requires)|V1 engine",
        "vLLM's start failed over its V1 engine",
        "V1 was written for 8.0 and newer at first, and hides the model in another process (vllm#15853, trl#3115)",
        Help("Use the older engine where the release still has it", "export VLLM_USE_V1=0", "likely"),
        Help("Or keep the engine in this process", "export VLLM_ENABLE_V1_MULTIPROCESSING=0", "likely"),
    ),
    _option(
        r"nvcc|FlashInfer|CUDA_HOME|ninja|no supported CUDA architectures|SM ?12.* requires CUDA|"
        r"static-global-template|compress-mode|"
        r"compilation failed.*\.cu",
        "vLLM's start failed while FlashInfer compiled a kernel",
        "FlashInfer compiles at run time with nvcc and ninja; vLLM's own sampler needs neither (vllm#49497)",
        _NO_SAMPLER,
    ),
    _option(
        r"FLASH_ATTN|flash.?attention|VLLM_ATTENTION_BACKEND|attention backend|head size",
        "vLLM's start failed over its choice of attention backend",
        "FlashAttention needs 8.0 and certain head sizes; vLLM has other backends",
        Help("Choose another backend", "export VLLM_ATTENTION_BACKEND=TRITON_ATTN", "likely"),
    ),
    _option(
        r"forked subprocess|'spawn' start method|before the current process has finished its bootstrapping",
        "vLLM's start failed over how its worker process was started",
        "CUDA does not survive a fork, and a spawned worker imports the main script again, which needs a __main__ guard",
        Help("Spawn the workers", "export VLLM_WORKER_MULTIPROCESSING_METHOD=spawn", "certain"),
    ),
    _option(
        r"expandable.?segments",
        "vLLM's sleep mode does not go with expandable segments",
        "its memory pool and torch's expandable segments exclude each other",
        Help("Unset the allocator option", "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF", "certain"),
    ),
    _option(
        r"NCCL|/dev/shm|shared memory|unhandled system error|world.size|tensor.parallel",
        "vLLM's start failed in the talk between several GPUs",
        "NCCL needs shared memory (Docker gives 64 MB); one GPU needs none (vllm#789)",
        Help("Use one GPU, or a container with --ipc=host or --shm-size=8g", None, "likely"),
    ),
    _option(
        r"max_model_len|max_num_batched_tokens|max_num_seqs|max_lora_rank|max_loras|swap.?space|block_size|"
        r"gpu_memory_utilization.{0,40}(?:must|should|less|between)|chunked.?prefill.{0,40}not support|"
        r"sleep mode is not supported",
        "vLLM's start failed over the size or option it was asked for",
        "vLLM checks its sizes against the model's, and its options against the card, before it loads anything",
        Help(
            "Ask for other values: the text names the option, and the plan's own lengths fit the model", None, "certain"
        ),
    ),
    _option(
        r"enforce_eager|graph capture failed|(?:bfloat16|bf16|float16) is not supported|bf16 not supported|"
        r"supported dtypes",
        "vLLM's start failed over a data type or its compilation, not over the card",
        "dtype and enforce_eager choose between kernels; the error names the one that is missing",
        Help("Ask for another dtype, or start it with enforce_eager=True", None, "likely"),
    ),
    _option(
        r"bitsandbytes|param_data\.shape|bnb|4.?bit",
        "vLLM's start failed over 4-bit weights",
        "4-bit weights break with vLLM's compilation or weight sync in several versions (unsloth#4841, trl#4973)",
        Help("Give the engine 16-bit or FP8 weights, or start it with enforce_eager=True", None, "likely"),
    ),
    _option(
        r"huggingface\.co|hf\.co|gated repo|offline mode|LocalEntryNotFound|couldn't connect|trust_remote_code|"
        r"is not a local folder|"
        r"address already in use|name resolution",
        "vLLM's start failed over the model's files or a port, not over the machine",
        "the trial needs the model's files at hand",
        Help("Download the model first, or name a local folder", None, "certain"),
    ),
)
