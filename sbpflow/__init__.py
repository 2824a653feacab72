"""SBP-parallel Wide & Deep training: layouts, conversions between them, and embeddings on top."""

__version__ = "0.1.0"
