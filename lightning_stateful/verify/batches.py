"""Digests of the samples in a batch, of all that they hold: tensors, arrays, strings, numbers, images, objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightning_stateful.generators.attributes import attributes_of
from lightning_stateful.samplers.fingerprint import as_array, hex_digest, value_as_text

_DEPTH = 12
_SHOWN_LEAVES, _SHOWN_VALUES = 3, 4


def digests_of(batch: Any, num_samples: int | None = None) -> list[str]:
    """A digest for each sample of a batch, over its whole content.

    Args:
        batch: Tensors, arrays and lists with a row for each sample, in dicts, tuples and objects; or a list of samples.
        num_samples: The samples of the batch, where that is known.

    Returns:
        Hexadecimal digests, equal in every process for equal content; a single one of a batch that cannot be divided.
    """
    leaves = list(_leaves(batch, ""))
    lengths = {_num_rows(leaf) for _, leaf in leaves}
    num_rows = lengths.pop() if len(lengths) == 1 else None
    if num_rows and num_samples in (None, num_rows):
        return [hex_digest(*_bytes_of([(path, leaf[row]) for path, leaf in leaves])) for row in range(num_rows)]
    if isinstance(batch, (list, tuple)) and batch and num_samples in (None, len(batch)):
        return [hex_digest(*_bytes_of(sample)) for sample in batch]
    return [hex_digest(*_bytes_of(batch))]


def shown(batch: Any) -> str:
    """A line on a batch for people: types, shapes and the first numbers."""
    leaves = list(_leaves(batch, ""))
    parts = [f"{path.lstrip('.')} {_shown(leaf)}".strip() for path, leaf in leaves[:_SHOWN_LEAVES]]
    return "; ".join([*parts, *(["..."] if len(leaves) > _SHOWN_LEAVES else [])])


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors, arrays, lists of plain values and other values in containers, by path."""
    if depth < _DEPTH:
        if isinstance(value, Mapping):
            for key, part in value.items():
                yield from _leaves(part, f"{path}.{key}", depth + 1)
            return
        if isinstance(value, (list, tuple)) and any(isinstance(part, _CONTAINERS) for part in value):
            for number, part in enumerate(value):
                yield from _leaves(part, f"{path}.{number}", depth + 1)
            return
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from _leaves(getattr(value, field.name, None), f"{path}.{field.name}", depth + 1)
            return
    yield path, value


_CONTAINERS = (torch.Tensor, np.ndarray, Mapping, list, tuple)


def _num_rows(leaf: Any) -> int | None:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return leaf.shape[0] if leaf.ndim else None
    return len(leaf) if isinstance(leaf, (list, tuple)) else None


def _bytes_of(value: Any, depth: int = 0) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        value = as_array(value if value.layout is torch.strided else value.to_dense())
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        yield f"{value.dtype.str}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, np.ndarray):
        yield from _bytes_of(value.tolist(), depth)
    elif isinstance(value, bytes):
        yield b"b%d:" % len(value) + value
    elif value is None or isinstance(value, (bool, int, float, complex, str)):
        yield f"{type(value).__name__}{value!r};".encode(errors="surrogatepass")
    elif (text := value_as_text(value)) is not None:
        yield f"{type(value).__name__} {text};".encode(errors="surrogatepass")
    elif depth >= _DEPTH:
        yield type(value).__qualname__.encode()
    else:
        yield from _bytes_of_object(value, depth + 1)


def _bytes_of_object(value: Any, depth: int) -> Iterator[bytes]:
    yield f"{type(value).__qualname__}(".encode()
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _bytes_of(key, depth)
            yield from _bytes_of(part, depth)
    elif isinstance(value, (set, frozenset)):
        # Equal sets have no order.
        yield from sorted(b"".join(_bytes_of(part, depth)) for part in value)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _bytes_of(part, depth)
    elif callable(getattr(value, "tobytes", None)):
        # An image of PIL's.
        yield repr((getattr(value, "mode", None), getattr(value, "size", None))).encode()
        yield value.tobytes()
    elif not isinstance(value, type):
        yield from _bytes_of(attributes_of(value), depth)
    yield b")"


def _shown(leaf: Any) -> str:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        kind = str(leaf.dtype).removeprefix("torch.")
        values: Sequence[Any] = leaf.reshape(-1)[:_SHOWN_VALUES].tolist()
        numbers = " ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)
        more = " ..." if int(np.prod(leaf.shape)) > _SHOWN_VALUES else ""
        return f"{kind}{list(leaf.shape)} {numbers}{more}"
    text = " ".join(repr(leaf).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
