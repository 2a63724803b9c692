"""Differential privacy: what a release costs, and the noise that pays for it."""
