"""Serves trained models: bundles that score raw rows, their deltas, and an HTTP server."""
