"""Features of pipelines that few runs use.

- asynchronous passes, with weights kept by round and late gradients corrected (PipeDream's stashes;
  decision 016): kept_versions, stash
- free replicas, with versions of the frozen embedding (decision 019): embedding_sync,
  embedding_versions
- AQ-SGD's memory of samples (decision 018): sample_memory, sample_inputs

These features promise less than the core. Each is checked against its oracle, in the law tests and
the simulations of `make test-long`; it gets no kernel, no tuning and no further guarantee, and may
change between releases.

May import every other room of node/pipeline. The core imports nothing of it: lifecycle/features.py
imports a feature when a run's terms ask for it. Start reading at kept_versions.py."""
