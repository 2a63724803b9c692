"""All keys of a run's TOML, from the schemas that check it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fedward_common.aggregation_options import RULES
from fedward_common.algorithms.registry import ALGORITHMS
from fedward_common.config import RunConfig
from fedward_common.explain import show
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_WORDS = {"int": "whole number", "float": "number", "str": "text", "bool": "true | false"}


@dataclass(frozen=True)
class Key:
    """One key. table: "" for the top. type: with bounds. default: "required" if there is none."""

    table: str
    name: str
    type: str
    default: str
    description: str


def all_keys() -> Iterator[Key]:
    """Every key of `RunConfig`, then the options of each algorithm and each rule of aggregation."""
    tables: list[tuple[str, type[BaseModel]]] = []
    for name, field in RunConfig.model_fields.items():
        if name in ("algorithm", "aggregation"):
            continue
        model = _table(field.annotation)
        if model is not None:
            tables.append((field.alias or name, model))
        else:
            yield _key("", name, field)
    for table, model in tables:
        for name, field in model.model_fields.items():
            yield _key(table, name, field)
    for algorithm, implementation in sorted(ALGORITHMS.items()):
        table = f'algorithm, name = "{algorithm}"'
        yield from _variant(table, "name", algorithm, "required", implementation, implementation.Options)
    for rule, options in sorted(RULES.items()):
        default = show("mean") if rule == "mean" else "required"
        yield from _variant(f'aggregation, rule = "{rule}"', "rule", rule, default, options, options)


def _variant(
    table: str, key: str, value: str, default: str, documented: type, options: type[BaseModel]
) -> Iterator[Key]:
    """The keys of a table that is read by what its `key` says."""
    for name, field in options.model_fields.items():
        if name != key:
            yield _key(table, name, field)
        else:
            summary = (documented.__doc__ or "").strip().splitlines()
            yield Key(table, key, show(value), default, summary[0] if summary else "")


def _table(annotation: Any) -> type[BaseModel] | None:
    """The model of a table, which may be left out; None for a single key."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _key(table: str, name: str, field: FieldInfo) -> Key:
    default = field.get_default(call_default_factory=True, validated_data={})
    shown = "required" if default is PydanticUndefined else "–" if default is None else show(default)
    words = " ".join(part for part in (_type(field.annotation), *_limits(field.metadata)) if part)
    return Key(table, name, words, shown, field.description or "")


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        found = [_type(arguments[0])]
        for extra in arguments[1:]:
            found.extend(_limits(getattr(extra, "metadata", [extra])))
        return " ".join(found)
    if origin in (Union, types.UnionType):
        # A table of several shapes is one table.
        return " | ".join(dict.fromkeys(_type(part) for part in arguments if part is not type(None)))
    if origin is Literal:
        return " | ".join(show(value) for value in arguments)
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return _WORDS.get(getattr(annotation, "__name__", ""), str(annotation))


def _limits(metadata: list[Any]) -> list[str]:
    return [
        f"{sign} {_plain(getattr(item, attribute))}"
        for item in metadata
        for attribute, sign in _BOUNDS.items()
        if isinstance(getattr(item, attribute, None), int | float)
    ]


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)
