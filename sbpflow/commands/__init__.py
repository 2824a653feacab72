"""The commands of ``sbpflow``, one file each. They compose, so they may import every package."""
