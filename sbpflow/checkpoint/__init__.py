"""Checkpoints that any number of ranks can load: bytes and JSON by logical tensor name."""
