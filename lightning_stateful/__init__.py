"""Stop a PyTorch Lightning run anywhere and resume it exactly. See ``docs/architecture.md``."""
