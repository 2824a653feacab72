"""Chooses where each embedding table is stored, using costs measured on the current machine.

This package imports ``sbpflow``, never vice versa. ``docs/planner.md`` is the user documentation.
"""
