"""The commands of ``sbpflow``, one file each. As composition roots they may import any package."""
