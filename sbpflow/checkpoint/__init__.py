"""Checkpoints without layout: bytes and JSON by logical name, for any number of ranks."""
