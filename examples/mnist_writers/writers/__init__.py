"""MNIST by the people who wrote it."""
