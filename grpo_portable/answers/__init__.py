"""Numbers and expressions read from texts: the one extractor, and who is right.

Other programs find the two functions they need here; what else there is lies in the modules, as `answers.extractor.read`.
"""

from grpo_portable.answers.extractor import extract, is_correct

__all__ = ["extract", "is_correct"]
