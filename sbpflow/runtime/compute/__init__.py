"""The computing resources of this machine: devices, compilers, memory, package versions."""
