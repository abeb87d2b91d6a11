"""Parts that methods are made of: outer optimizers, error feedback, round books, schedules, seeded masks, state I/O.

May import optimizers/method.py and compression.
Start reading at stateful.py and state_fields.py.
"""
