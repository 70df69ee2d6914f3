"""Pretrain a small language model on a stream that is tokenized and packed on the way, stop in between, and go on.

The sources of Python's standard library, or any JSON-lines files with a ``text`` column, are streamed by Hugging Face's
``datasets``, tokenized in batches, and packed into sequences of one length: documents are joined and cut, so that no
token is padding. The run is stopped in the middle of an epoch, resumed in fresh objects, and compared with one that is
not stopped. Then it is resumed with another number of workers: the rest of the epoch is what had not been trained on.
"""

from __future__ import annotations

import argparse
import json
import logging
import sysconfig
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn

from lightning_stateful import Packing, StreamDataModule

VOCABULARY, END_OF_TEXT = 1000, 0


def write_documents(folder: Path, num_shards: int, documents_a_shard: int) -> list[str]:
    """JSON-lines files, each line a paragraph of the standard library's sources with its number."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    paragraphs = (text for path in sources for text in path.read_text(encoding="utf-8").split("\n\n") if text.strip())
    files = []
    for shard in range(num_shards):
        path = folder / f"{shard:03}.jsonl"
        numbered = zip(range(documents_a_shard), paragraphs, strict=False)
        rows = [{"document": shard * documents_a_shard + number, "text": text} for number, text in numbered]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        files.append(str(path))
    return files


def train_tokenizer(files: list[str]) -> str:
    """A byte-pair tokenizer of the first file's text, as JSON."""
    rows = [json.loads(line) for line in Path(files[0]).read_text(encoding="utf-8").splitlines()]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([row["text"] for row in rows], trainer)
    return tokenizer.to_str()


def tokenize(rows: dict[str, list[Any]], tokenizer_json: str) -> dict[str, list[Any]]:
    """Tokens of some documents; and, to follow them, the number of its document for each token."""
    # In one thread: the tokenizer's own threads do not survive the fork of a worker.
    tokens = [Tokenizer.from_str(tokenizer_json).encode(text).ids for text in rows["text"]]
    numbers = [[number] * len(ids) for number, ids in zip(rows["document"], tokens, strict=True)]
    return {"input_ids": tokens, "document": numbers}


class TextModel(pl.LightningModule):
    """A decoder of two layers that attends within a document only."""

    def __init__(self, length: int, width: int = 64) -> None:
        super().__init__()
        self.length = length
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True)
        self.layers, self.head = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(width, VOCABULARY),
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of the next token, with ``position_ids`` and a mask by ``document_ids``."""
        ids, documents = batch["input_ids"], batch["document_ids"]
        is_later = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        mask = is_later | (documents[:, :, None] != documents[:, None, :])
        hidden = self.embed(ids) + self.places(batch["position_ids"])
        # One mask for each of the two heads.
        logits = self.head(self.layers(hidden, mask=mask.repeat_interleave(2, 0)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Ledger(pl.Callback):
    """Remembers the tokens of every batch, each with its document."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the tokens."""
        is_real = batch["document_ids"] >= 0
        columns = [batch[name][is_real].tolist() for name in ("document", "input_ids")]
        self.batches.append(list(zip(*columns, strict=True)))


def train(
    data: StreamDataModule, length: int, ckpt_path: Path | None = None, **limits: Any
) -> tuple[pl.Trainer, list[list[tuple[int, ...]]]]:
    """Fit a fresh model."""
    torch.manual_seed(0)
    ledger = Ledger()
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ledger],
        **limits,
    )
    trainer.fit(TextModel(length), datamodule=data, ckpt_path=ckpt_path)
    return trainer, ledger.batches


def main() -> None:
    """Train without a stop, with one, and with one and other workers; compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", nargs="+", help="JSON-lines files with text and document, in place of the library")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--documents", type=int, default=200, help="documents of a shard")
    parser.add_argument("--stop", type=int, default=40, help="step after which the second run is stopped")
    parser.add_argument("--fast", action="store_true", help="a tenth of the data")
    options = parser.parse_args()
    if options.fast:
        options.shards, options.documents, options.stop = 4, 40, 5
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    with tempfile.TemporaryDirectory() as folder:
        files = options.files or write_documents(Path(folder), options.shards, options.documents)
        tokenizer = train_tokenizer(files)

        def data(num_workers: int = 2) -> StreamDataModule:
            documents = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
            tokens = documents.map(
                tokenize,
                batched=True,
                batch_size=16,
                remove_columns=["text", "document"],
                fn_kwargs={"tokenizer_json": tokenizer},
            )
            packing = Packing(options.length, separator=END_OF_TEXT)
            return StreamDataModule(tokens, packing=packing, batch_size=8, num_workers=num_workers, seed=0)

        checkpoint = Path(folder) / "stopped.ckpt"
        whole, expected = train(data(), options.length, max_epochs=1)
        stopped, first = train(data(), options.length, max_steps=options.stop)
        stopped.save_checkpoint(checkpoint)
        resumed, second = train(data(), options.length, checkpoint, max_epochs=1)
        _, rest = train(data(num_workers=3), options.length, checkpoint, max_epochs=1)

    models = [trainer.lightning_module.state_dict().values() for trainer in (whole, resumed)]
    same_weights = all(torch.equal(a, b) for a, b in zip(*models, strict=True))
    same_batches = first + second == expected
    tokens, again = (Counter(token for batch in run for token in batch) for run in (expected, first + rest))
    print(f"{len(files)} files, {sum(tokens.values())} tokens in {len(expected)} batches of packed sequences")
    print(f"stopped after step {options.stop} and resumed: same batches {same_batches}, same weights {same_weights}")
    lost, twice = sum((tokens - again).values()), sum((again - tokens).values())
    print(f"resumed in three workers: {lost} tokens lost, {twice} more than once")
    if not (same_batches and same_weights and tokens == again):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
