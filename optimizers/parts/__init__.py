"""Parts of methods: outer optimizers, error feedback, round books, schedules, seeded masks, state.

May import optimizers/method.py and compression.
Start reading at stateful.py and state_fields.py.
"""
