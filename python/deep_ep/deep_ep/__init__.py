"""DeepEP's name for :mod:`uccl.ep`: programs that import ``deep_ep`` run unchanged.

A distribution of its own, so that nobody gets this name who has not asked for it.
"""

from uccl.ep import *  # noqa: F403
from uccl.ep import __all__ as __all__

#: The version of DeepEP whose interface this is.
__version__ = "2.1.0"
