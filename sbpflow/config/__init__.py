"""Defines, reads and checks the configuration. This package does not depend on any model."""
