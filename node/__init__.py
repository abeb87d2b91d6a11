"""Glue: the process. Command line, manifest, data, model, replica, driver and its loops, checkpoints, live view."""
