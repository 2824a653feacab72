"""Finds the computing resources of this machine: devices, compilers, memory, packages."""
