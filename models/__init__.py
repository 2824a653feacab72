"""The models with their configurations, one module per model; ``registry`` lists the models."""
