"""Files and folders: paths, locks, JSON and caches."""
