"""The loader's back-ends, as far as they are installed."""

import pytest

from sbpflow.data.read.loader import choose_backend

HERE = ["memmap", "dali"] if choose_backend("auto") == "dali" else ["memmap"]
needs_dali = pytest.mark.skipif("dali" not in HERE, reason="DALI is not installed")
BACKENDS = ["memmap", pytest.param("dali", marks=needs_dali)]
