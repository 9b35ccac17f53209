"""`python -m grpo_portable` is `grpo-portable`."""

from grpo_portable.cli import main

main()
