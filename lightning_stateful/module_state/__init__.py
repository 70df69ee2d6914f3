"""What of the module, its metrics, optimizers and callbacks a resume needs, and Lightning's checkpoints lack."""
