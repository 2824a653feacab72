"""Implements the ``sbpflow`` commands, one per file; these files may import any package."""
