"""Models: one module each, with its configuration; ``registry`` lists them."""
