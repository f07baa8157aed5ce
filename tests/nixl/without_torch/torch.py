"""A stand-in for PyTorch where it is not installed: NIXL 1.0 imports it to check whether arguments
are tensors."""


class Tensor:
    """No argument is an instance."""
