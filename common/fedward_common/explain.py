"""A pydantic error for the person at the terminal: field, value, rule, way out; one line a problem."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

# Error type -> rule and way out; filled with the error's own context.
_RULES: dict[str, str] = {
    "greater_than_equal": "must be at least {ge}. Raise it to {ge} or more.",
    "greater_than": "must be more than {gt}. Raise it.",
    "less_than_equal": "must be at most {le}. Lower it to {le} or less.",
    "less_than": "must be less than {lt}. Lower it.",
    "finite_number": "must be a finite number, not inf or nan. Write a number.",
    "int_type": "must be a whole number. Write it without quotes and without a decimal point.",
    "float_type": "must be a number. Write it without quotes.",
    "bool_type": "must be true or false. Write it in lower case, without quotes.",
    "string_type": 'must be text. Put it in double quotes: "…".',
    "literal_error": "must be {expected}. Use one of these.",
    "too_short": "must have at least {min_length} entry. Add one.",
    "tuple_type": 'must be a list. Put it in brackets: ["…"].',
    "list_type": 'must be a list. Put it in brackets: ["…"].',
    "model_type": "must be a table. Write its keys below a [{field}] line.",
    "model_attributes_type": "must be a table. Write its keys below a [{field}] line.",
}

NAME_PATTERN = r"^[a-z0-9]([a-z0-9_.-]{0,62}[a-z0-9])?$"
TASK_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
SHA256_PATTERN = r"^[0-9a-f]{64}$"
PATTERNS = {
    NAME_PATTERN: (
        "must be 1 to 64 lower-case letters, digits, '.', '_' or '-', a letter or digit first and last. Rename it so."
    ),
    SHA256_PATTERN: "must be a SHA-256: 64 digits 0-9 and a-f. Copy it whole.",
    TASK_PATTERN: "must be 'module:Class' of the bundle. Write for example \"digits.task:Digits\".",
}
"""Patterns that are explained in words."""


@dataclass(frozen=True)
class Source:
    """What was validated. model: its fields give the suggestions. file: where keys are written. help: where all
    keys are listed."""

    model: type[BaseModel] | None = None
    file: str = "the file"
    help: str = ""


def explain(error: ValidationError, source: Source = Source(), prefix: Sequence[str | int] = ()) -> str:
    """`error` as lines; `prefix` stands before each field's name."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        nested = item.get("ctx", {}).get("error")
        location = [*prefix, *item["loc"]]
        if isinstance(nested, NestedError):
            lines.append(explain(nested.error, replace(source, model=nested.model), location))
            continue
        lines.append(_line(item, location, source, _fields_at(source.model, item["loc"])))
    return "\n".join(lines)


class NestedError(ValueError):
    """Carries a `ValidationError` of another model through a validator, whole."""

    def __init__(self, error: ValidationError, model: type[BaseModel]) -> None:
        super().__init__(str(error))
        self.error = error
        self.model = model


def _line(item: Any, location: Sequence[str | int], source: Source, known: Iterable[str]) -> str:
    field = dotted(location)
    value, kind, context = item["input"], item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{field} = {show(value)}: unknown key. {_suggest(str(location[-1]), source, known)}"
    if kind == "missing":
        return f"{field}: missing. Add it to {source.file}{source.help}."
    if kind == "string_pattern_mismatch":
        rule = _pattern_rule(str(context.get("pattern", "")))
    elif kind in _RULES:
        rule = _RULES[kind].format(field=field, **context)
    else:
        rule = item["msg"].removeprefix("Value error, ")
    if not field or rule.startswith(f"{field}."):
        return rule
    return f"{field} = {show(value)}: {rule}"


def _pattern_rule(pattern: str) -> str:
    return PATTERNS.get(pattern, f"must match {pattern}. Correct it.")


def _suggest(key: str, source: Source, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"{guess}Correct or remove it{source.help}."


def _fields_at(model: type[BaseModel] | None, location: Sequence[str | int]) -> list[str]:
    """Keys of the table in which the last part of `location` stands."""
    if model is None:
        return []
    here: type[BaseModel] = model
    for part in location[:-1]:
        field = next((field for name, field in here.model_fields.items() if part in (name, field.alias)), None)
        tables = [] if field is None else [field.annotation, *get_args(field.annotation)]
        found = next((table for table in tables if isinstance(table, type) and issubclass(table, BaseModel)), None)
        if found is None:
            return []
        here = found
    return [field.alias or name for name, field in here.model_fields.items()]


def dotted(location: Sequence[str | int]) -> str:
    """("cohort", "nodes", 0) -> "cohort.nodes[0]"."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def show(value: object) -> str:
    """`value` as it would stand in TOML, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "…"
