"""Files and folders of this machine: paths, locks, JSON, caches."""
