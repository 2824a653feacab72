"""Chooses where every embedding table lives, from costs measured on the machine at hand.

Imports ``sbpflow``, never the other way round; ``docs/planner.md`` is the page for users.
"""
