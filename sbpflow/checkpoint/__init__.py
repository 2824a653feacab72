"""Saves and loads checkpoints: bytes and JSON by logical tensor name, for any number of ranks."""
