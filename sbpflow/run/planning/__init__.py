"""From a configuration to a plan: layouts, kernels, transfers, and how they are explained."""
