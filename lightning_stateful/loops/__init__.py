"""Lightning's loops, callbacks and ranks: what a checkpoint keeps of them, and how a resume puts them back."""
