"""Names of functions in Python's standard library, by the module that they come from, and a sampler of one's own."""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Sampler

LONGEST = 24


class Names(Dataset[tuple[Tensor, int]]):
    """Samples are the characters of a name and the number of its module."""

    def __init__(self, num_modules: int = 40) -> None:
        self.names: list[str] = []
        self.labels: list[int] = []
        modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: -path.stat().st_size)
        for label, path in enumerate(sorted(modules[:num_modules])):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            names = sorted({node.name for node in nodes if isinstance(node, ast.FunctionDef)})
            self.names += names
            self.labels += [label] * len(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        codes = [min(ord(character), 127) for character in self.names[index][:LONGEST]]
        return torch.tensor(codes + [0] * (LONGEST - len(codes))), self.labels[index]


class ClassBalanced(Sampler[list[int]]):
    """Batches of so many modules, each with so many names. It knows nothing of ranks, epochs or checkpoints."""

    def __init__(self, labels: list[int], num_classes: int = 8, num_instances: int = 4, num_batches: int = 50) -> None:
        self.by_label: dict[int, list[int]] = {}
        for index, label in enumerate(labels):
            self.by_label.setdefault(label, []).append(index)
        self.num_classes, self.num_instances, self.num_batches = num_classes, num_instances, num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.num_batches):
            labels = random.sample(sorted(self.by_label), self.num_classes)
            yield [index for label in labels for index in random.choices(self.by_label[label], k=self.num_instances)]


class Encoder(nn.Module):
    """Puts names near those of the same module."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(width * LONGEST, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, width))

    def forward(self, names: Tensor) -> Tensor:
        """Embeddings of shape ``(batch, width)``, of length one."""
        return functional.normalize(self.layers(self.embed(names).flatten(1)), dim=1)


def contrastive_loss(embedded: Tensor, labels: Tensor) -> Tensor:
    """Names of one module should be nearer to each other than to others; every batch needs several of each."""
    near = embedded @ embedded.T / 0.1
    near = near.masked_fill(torch.eye(len(labels), dtype=torch.bool), float("-inf"))
    same = (labels[:, None] == labels[None, :]).fill_diagonal_(fill_value=False)
    return -(near.log_softmax(1).masked_fill(~same, 0).sum(1) / same.sum(1)).mean()


def digest(model: nn.Module) -> str:
    """Tells weights apart to the last bit."""
    values = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
    return hashlib.blake2b(values, digest_size=8).hexdigest()
