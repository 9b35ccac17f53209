"""Numbers and expressions read from texts: the one extractor, and who is right."""

from grpo_portable.answers.extractor import extract, is_correct

__all__ = ["extract", "is_correct"]
