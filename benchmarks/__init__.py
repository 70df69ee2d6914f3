"""Speed, memory and size, each beside a named peer in the same run: ``python -m benchmarks``.

One script a claim. A script interleaves its subjects (A B A B ...), so that a busy moment of the machine hits all of
them, takes the best of several repetitions, and reports ratios. Results with machine and date lie in ``results/``.
"""
