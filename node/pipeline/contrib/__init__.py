"""Rare features of pipelines, for many readers and few users.

- asynchronous passes, with weights kept by round and late gradients corrected (PipeDream's stashes;
  decision 016): kept_versions, stash
- free replicas, with versions of the frozen embedding (decision 019): embedding_sync,
  embedding_versions
- AQ-SGD's memory of samples (decision 018): sample_memory, sample_inputs

The promise is smaller than the core's: each is correct against its oracle, in the law tests and
simulations of `make test-long`; it gets no kernel, tuning or further guarantee of its own and may
change between releases.

May import every other room of node/pipeline. The core imports nothing of it: lifecycle/features.py
imports a maker when a run's terms ask for it. Start reading at kept_versions.py."""
