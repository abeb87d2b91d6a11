"""Questions and their answers: benchmarks and paper reproductions. Imports all, imported by none."""
