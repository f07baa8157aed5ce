"""A NIXL whose plugins have another shape."""

from __future__ import annotations

import pytest
import uccl


def test_it_is_refused_with_what_to_do() -> None:
    with pytest.raises(ImportError, match=r"NIXL 0\.10\.1 is too old.*pip install 'nixl>="):
        uccl.nixl_plugin_dir()
