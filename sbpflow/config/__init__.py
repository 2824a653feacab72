"""Defines, reads and checks the configuration. No code in this package depends on a model."""
