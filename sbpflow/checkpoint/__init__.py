"""Saves checkpoints, which any number of ranks can load, as bytes and JSON by logical tensor
name.
"""
