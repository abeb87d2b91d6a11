"""Methods: tensors in, tensors out. Knows no peer, no byte count and no clock."""
