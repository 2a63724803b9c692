"""Handwritten digits at five sites."""
