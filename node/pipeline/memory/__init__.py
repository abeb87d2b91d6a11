"""What the ends of an edge remember of samples, for codecs that send what changed since the last visit (AQ-SGD).

May import node/pipeline/passes.
Start reading at samples.py.
"""
