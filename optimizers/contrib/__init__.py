"""Methods that few will use and many would read, each in the catalog under its name.

async (asynchronous), co2, delayed, desloc, edit (with judge), flexdemo, sparta-diloco. The promise is smaller than the
core's: each is correct against its oracle and keeps the laws of optimizers/method.py, checked in the law tests and
simulations of `make test-long`; it gets no kernel of its own, no tuning and no further guarantees, and its options may
change between releases.

May import optimizers' core and parts; the core imports nothing of it: the catalog names the classes.
Start reading at co2.py.
"""
