"""Lists the loader's installed backends."""

import pytest

from sbpflow.data.read.loader import choose_backend

INSTALLED = ["memmap", "dali"] if choose_backend("auto") == "dali" else ["memmap"]
needs_dali = pytest.mark.skipif("dali" not in INSTALLED, reason="DALI is not installed")
BACKENDS = ["memmap", pytest.param("dali", marks=needs_dali)]
