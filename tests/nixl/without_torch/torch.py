"""Stands where PyTorch is not installed: NIXL 1.0 imports it, to ask of its arguments whether they are tensors."""


class Tensor:
    """No argument is one."""
