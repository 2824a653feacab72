"""The models and their configurations, one module per model; ``registry`` lists the models."""
