"""Gradients between workers, on torch.distributed."""
