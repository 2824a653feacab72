"""Stores that keep all rows in slower memory and cache some of them in the slots of a kernel."""
