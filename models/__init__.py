"""The models, each in a module with its configuration; ``registry`` lists them."""
