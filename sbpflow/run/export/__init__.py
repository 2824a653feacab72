"""Export of trained models to programs without sbpflow."""
