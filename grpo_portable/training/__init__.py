"""GRPO and its bootstrap on TRL: our rollouts, batches, guards, metrics and checkpoints."""
