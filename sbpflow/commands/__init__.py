"""The ``sbpflow`` commands, one file each. These files may import any package."""
