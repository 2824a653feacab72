"""Serves trained models: exported bundles that score raw rows, their deltas, and an HTTP server."""
