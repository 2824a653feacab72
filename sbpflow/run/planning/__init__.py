"""From a configuration to a plan: layouts, kernels, transfers, and ``explain``."""
