"""A run on several machines, as a job that Slurm starts."""
