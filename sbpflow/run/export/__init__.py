"""A trained model for programs without sbpflow."""
