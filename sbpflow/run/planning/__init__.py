"""Turns a configuration into a plan: layouts, kernels, transfers, and ``explain``."""
