"""Chooses where each embedding table is stored, using costs measured on the current machine.

This package imports ``sbpflow``; in ``sbpflow``, only the commands import this package.
``docs/planner.md`` is the user documentation.
"""
