"""A batch's ids: checked, and turned into rows of storages."""
