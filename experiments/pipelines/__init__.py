"""Questions about pipelines: published schedules simulated again, and what they are worth on other networks."""
