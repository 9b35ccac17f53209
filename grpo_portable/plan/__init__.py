"""Recipe and diagnosis → what runs on this machine: path, sizes, GPUs, and the recipes that fit."""
