"""Benchmarks: each module is one command that writes one JSON file of figures to `bench/results/`."""
