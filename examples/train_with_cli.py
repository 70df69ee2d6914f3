"""The byte model from a YAML file, by the LightningCLI.

    python examples/train_with_cli.py fit --config examples/train_with_cli.yaml
    python examples/train_with_cli.py fit --config examples/train_with_cli.yaml --ckpt_path last.ckpt

The second command goes on at the very next batch. Arguments of the data module stand below ``data:`` in the file, and
can be given on the command line, as ``--data.batch_size 32``.
"""

from __future__ import annotations

from byte_model import ByteModel, SourceBytes
from lightning.pytorch.cli import LightningCLI

from lightning_stateful import StatefulDataModule


class ByteData(StatefulDataModule):
    """Windows of bytes from the sources of Python's standard library.

    Args:
        num_samples: Windows to train on; a tenth as many are validated on.
        length: Bytes in a window.
        batch_size: Windows in a batch of one process.
        num_workers: Worker processes of each loader.
        seed: Chooses the order.
    """

    def __init__(
        self, num_samples: int = 6000, length: int = 64, batch_size: int = 16, num_workers: int = 0, seed: int = 0
    ) -> None:
        super().__init__(
            SourceBytes(num_samples, length),
            val=SourceBytes(num_samples // 10, length, skip=num_samples),
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
        )


def main() -> None:
    """Read the command line, and run what it says."""
    LightningCLI(ByteModel, ByteData, save_config_callback=None)


if __name__ == "__main__":
    main()
