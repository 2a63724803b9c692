"""Errors that a person reads: what was wrong, which rule it broke, and the way out."""

from __future__ import annotations


class FedwardError(Exception):
    """Base of every error that Fedward raises on purpose; its text is meant for the person at the terminal."""


class ConfigError(FedwardError):
    """A configuration was refused. One line a problem: field, value, rule, way out."""


class TaskError(FedwardError):
    """A task lacks something, or its code broke; the text names what to add or where it broke."""


class UpdateError(FedwardError):
    """An update failed the gate (keys, shapes, dtypes, finite values, weight)."""
