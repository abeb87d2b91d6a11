"""Methods that few will use and many will read, each in the catalog under its name.

async (asynchronous), co2, delayed, desloc, edit (with anomaly), flexdemo, sparta-diloco. They
promise less than the core: each is correct against its oracle and keeps the laws of
optimizers/method.py, checked by the law tests and simulations of `make test-long`. They get no
kernels, no tuning and no further guarantees, and options may change between releases.

May import optimizers' core and parts; the core imports nothing from here: the catalog names the
classes.
Start reading at co2.py.
"""
