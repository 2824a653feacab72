"""What a model is to a run, and an ordinary torch module as one."""
