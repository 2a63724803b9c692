"""Batches from map-style datasets: tensors are indexed whole, anything else goes through its collate
function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

Batch = Any
Collate = Callable[[list[Any]], Batch]


def flattened(dataset: Dataset[Any]) -> Dataset[Any]:
    """`dataset`, or the same examples as one `TensorDataset` if it is a `Subset` (of a subset …) of one.

    Copies the chosen rows once, so that every later batch is one indexing operation.
    """
    indices: torch.Tensor | None = None
    inner = dataset
    while type(inner) is Subset:
        own = torch.as_tensor(inner.indices, dtype=torch.int64)
        indices = own if indices is None else own[indices]
        inner = inner.dataset
    if indices is None or type(inner) is not TensorDataset:
        return dataset
    return TensorDataset(*(tensor[indices.to(tensor.device)] for tensor in inner.tensors))


def reader(dataset: Dataset[Any], collate: Collate | None, device: str) -> Callable[[torch.Tensor], Batch]:
    """A function from a vector of indices (int64) to the batch of those examples on `device`."""
    # A subclass may override __getitem__ (augmentation), so only the exact class takes the short way.
    if collate is None and type(dataset) is TensorDataset:
        tensors = dataset.tensors

        def read_rows(indices: torch.Tensor) -> Batch:
            return [tensor[indices.to(tensor.device)].to(device) for tensor in tensors]

        def read_rows_cpu(indices: torch.Tensor) -> Batch:
            return [tensor.index_select(0, indices) for tensor in tensors]

        local = device == "cpu" and all(tensor.device.type == "cpu" for tensor in tensors)
        return read_rows_cpu if local else read_rows

    join = collate or default_collate
    fetch_many = getattr(dataset, "__getitems__", None)

    def read_samples(indices: torch.Tensor) -> Batch:
        wanted = indices.tolist()
        samples = fetch_many(wanted) if callable(fetch_many) else [dataset[index] for index in wanted]
        return moved_to(join(samples), device)

    return read_samples


def moved_to(batch: Batch, device: str) -> Batch:
    """`batch` with all tensors in its lists, tuples and mappings on `device`; other values as they are."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved_to(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved_to(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved_to(value, device) for value in batch)
    return batch


def split(indices: torch.Tensor, size: int) -> list[torch.Tensor]:
    """`indices` in batches of `size`, none dropped.

    A last batch of a single example joins the one before it: batch norm has no variance of one example.
    """
    parts = list(indices.split(size))  # type: ignore[no-untyped-call]
    if len(parts) > 1 and size > 1 and len(parts[-1]) == 1:
        parts[-2:] = [indices[-(size + 1) :]]
    return parts


def epoch_length(count: int, size: int) -> int:
    """Number of batches that `split` makes of `count` examples."""
    whole, rest = divmod(count, size)
    lonely = rest == 1 and whole > 0 and size > 1
    return whole + (1 if rest and not lonely else 0)


def shuffled(count: int, size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Batches of indices without end: a new permutation for each pass over the data."""
    while True:
        yield from split(torch.randperm(count, generator=generator), size)


def length(dataset: Dataset[Any]) -> int:
    """Number of examples of a map-style dataset."""
    return len(cast("Any", dataset))
