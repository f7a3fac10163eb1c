"""Benchmarks: one script per measure, each with the bare runtime in the same run.

`python -m bench` runs all and writes results to bench/results/latest.json and the table to
docs/performance.md; `python -m bench create exec` runs some and only prints.
"""
