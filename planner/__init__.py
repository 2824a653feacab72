"""Chooses where every embedding table is stored, by costs measured on the present machine.

Imports ``sbpflow``, never the other way around; ``docs/planner.md`` is the page for users.
"""
