from __future__ import annotations

from pathlib import Path

import pytest
import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.make(folder)
    return folder
