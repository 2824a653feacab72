"""Provide the models and their configurations, one module per model; ``registry`` lists them."""
