"""What a run saves, resumes from, and is read back from."""
