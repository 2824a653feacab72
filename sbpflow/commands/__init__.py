"""Implements the ``sbpflow`` commands, one file each, which may import any package."""
