"""The short ways of an update: few kernels on a GPU, each tried before it is trusted."""
