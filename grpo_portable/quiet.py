"""Libraries' progress bars and notices for other developers, left out of what a user reads."""

from __future__ import annotations

import logging
import os
import warnings


def libraries() -> None:
    """Silence what says nothing about this run: bars, deprecations inside libraries, optional kernels that are not there."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft|torch)\..*")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # read once, at tqdm's import: the bar over a GGUF file's tensors
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes"):  # about optional kernels, at every import
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
