"""Train a small transformer on text of wildly different lengths, in batches of like lengths, and stop in between.

The text is the docstrings of Python's standard library, or any file of one sample a line; a byte-pair tokenizer is
trained on it on the spot. Samples are measured in parallel, and every batch is filled up to a budget of tokens. The run
is stopped in the middle of an epoch, resumed in fresh objects, and compared with one that is not stopped.
"""

from __future__ import annotations

import argparse
import ast
import logging
import sysconfig
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lightning_stateful import BucketDataModule
from lightning_stateful.report import padding_report

LONGEST, VOCABULARY, PAD = 256, 2000, 0


def docstrings(num_files: int = 150) -> list[str]:
    """The docstrings of the first modules of the standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                found.append(text)
    return found


class Text(Dataset[dict[str, Tensor]]):
    """Tokens of each sample, cut at 256, with its index."""

    def __init__(self, samples: list[str]) -> None:
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(samples, VOCABULARY, special_tokens=["<pad>"], show_progress=False)
        self.tokens = [encoded.ids[:LONGEST] for encoded in tokenizer.encode_batch(samples)]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "tokens": torch.tensor(self.tokens[index])}


def num_tokens(sample: dict[str, Tensor]) -> int:
    """What is measured."""
    return len(sample["tokens"])


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch, as long as its longest sample."""
    tokens = pad_sequence([sample["tokens"] for sample in samples], batch_first=True, padding_value=PAD)
    return {"index": torch.stack([sample["index"] for sample in samples]), "tokens": tokens}


class Transformer(pl.LightningModule):
    """Predicts each token from those before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.place = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        self.batches: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch."""
        self.batches.append(batch["index"].tolist())
        tokens = batch["tokens"]
        before, after = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(before.shape[1], device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(before.shape[1], device=tokens.device)
        states = self.layers(self.embed(before) + self.place(places), mask=mask, is_causal=True)
        total = nn.functional.cross_entropy(
            self.head(states).flatten(0, 1), after.flatten(), ignore_index=PAD, reduction="sum"
        )
        # A batch may hold nothing but samples of one token, which have nothing to predict.
        loss = total / (after != PAD).sum().clamp(min=1)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(data: BucketDataModule, *, max_steps: int, ckpt_path: Path | None = None) -> tuple[pl.Trainer, Transformer]:
    """Fit a fresh model."""
    torch.manual_seed(0)
    model = Transformer()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return trainer, model


def main() -> None:
    """Train without a stop, and with one; print how batches are filled, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="a file of one sample a line, in place of docstrings")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stop", type=int, default=25, help="step after which the second run is stopped")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    lines = docstrings() if options.text is None else options.text.read_text(encoding="utf-8").splitlines()
    text = Text([line for line in lines if line.strip()])

    with tempfile.TemporaryDirectory() as folder:

        def data(**how: Any) -> BucketDataModule:
            how = how or {"max_tokens": options.max_tokens}
            cache_file = Path(folder) / "lengths.npy"
            return BucketDataModule(text, lengths=num_tokens, collate_fn=pad, cache_file=cache_file, seed=0, **how)

        whole = padding_report(data().batch_sampler()).whole
        size = round(whole.samples_per_batch)
        # One bucket for all lengths is a plain shuffle.
        plain = padding_report(data(batch_size=size, num_buckets=1).batch_sampler()).whole
        print(f"{len(text)} samples of {whole.tokens} tokens")
        print(f"shuffled, {size} samples a batch: {plain.padding:.1%} padding")
        print(f"in buckets, {options.max_tokens} tokens a batch: {whole.padding:.1%} padding, {whole.steps} batches")

        checkpoint = Path(folder) / "stopped.ckpt"
        _, expected = train(data(), max_steps=options.steps)
        trainer, first = train(data(), max_steps=options.stop)
        trainer.save_checkpoint(checkpoint)
        _, second = train(data(), max_steps=options.steps, ckpt_path=checkpoint)

    same_batches = first.batches + second.batches == expected.batches
    pairs = zip(expected.state_dict().values(), second.state_dict().values(), strict=True)
    same_weights = all(torch.equal(a, b) for a, b in pairs)
    print(f"stopped after step {options.stop} and resumed: same batches {same_batches}, same weights {same_weights}")
    if not (same_batches and same_weights):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
