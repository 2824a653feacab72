"""Plans and executes whole runs: model interface, checkpoints, export, reports."""
