"""What a run has trained, in a safetensors file: read to start another run from it, or to use the model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fedward_common.algorithms.base import MODEL, STATISTIC
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError
from fedward_common.update import Kind, Layout, TensorSpec, Vector, Vectors
from safetensors import SafetensorError, safe_open

from fedward_server.checkpoint import COUNTER, FROZEN

if TYPE_CHECKING:
    from fedward_common.task import Task
    from torch import nn

_KINDS = {MODEL: Kind.TRAINABLE, STATISTIC: Kind.STATISTIC, COUNTER: Kind.COUNTER}


def load_vectors(layout: Layout, path: Path, built: Vectors) -> Vectors:
    """The flat vectors of a safetensors file that holds every shared tensor of `layout` by name.

    Counters may be missing: then those of the freshly `built` model stay. Frozen tensors may be missing too; those that
    are there must be the task's own. Raises `ConfigError`, naming each tensor.
    """
    try:
        with safe_open(path, framework="np") as file:
            beside = (file.metadata() or {}).get(FROZEN, layout.frozen)
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"initial_model: not a safetensors file: {error}") from error
    problems = []
    vectors: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        specs = layout.of_kind(kind)
        if not specs or (kind is Kind.COUNTER and not any(spec.name in found for spec in specs)):
            if name in built:
                vectors[name] = built[name]
            continue
        parts = []
        for spec in specs:
            tensor = found.get(spec.name)
            if tensor is None:
                problems.append(f"{spec.name}: missing")
            elif tensor.shape != spec.shape:
                problems.append(f"{spec.name}: shape {tensor.shape}, the model needs {spec.shape}")
            elif not np.isfinite(tensor).all():
                problems.append(f"{spec.name}: holds values that are not finite")
            else:
                parts.append(tensor.reshape(-1).astype(layout.dtype(kind), copy=False))
        if not problems:
            vectors[name] = np.concatenate(parts)
    problems += [
        f"{spec.name}: frozen, and with other values in the task's model: remove it from the file, or let model() have "
        "these"
        for spec in layout.of_kind(Kind.FROZEN)
        if spec.name in found and not holds(found[spec.name], spec)
    ]
    unknown = sorted(set(found) - {spec.name for spec in layout.tensors})
    problems += [f"{name}: not a tensor of the task's model" for name in unknown]
    if beside != layout.frozen:
        problems.append(
            "it was trained beside other frozen tensors: use the same base model and, with [lora], the same seed"
        )
    if problems:
        raise ConfigError("initial_model does not fit the task's model: " + "; ".join(problems))
    return vectors


def load_model(config: RunConfig, task: Task, path: Path) -> nn.Module:
    """The task's model as a run has left it, in eval mode: frozen tensors as `config` and `task` make them, the others
    from `path` (what 'fedward run model' or 'fedward simulate' wrote). Raises `ConfigError`, `TaskError`."""
    from fedward_common.model import fresh_model, laid_out

    model = fresh_model(config, task)
    layout = laid_out(config, task, model)
    built = {name: layout.pack(model.state_dict(), kind) for name, kind in _KINDS.items()}
    for name, vector in load_vectors(layout, path, built).items():
        layout.load(model, vector, _KINDS[name])
    return model.eval()


def holds(tensor: Vector, spec: TensorSpec) -> bool:
    """Whether `tensor` is the frozen tensor of `spec`, bit for bit."""
    raw = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    same = hashlib.sha256(raw.data).hexdigest() == spec.value
    return tensor.shape == spec.shape and tensor.dtype.name == spec.dtype and same
