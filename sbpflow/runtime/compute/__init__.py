"""What this machine computes with: devices, compilers, memory, installed versions."""
