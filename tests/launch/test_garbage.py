import gc

import pytest

from sbpflow.runtime.processes.garbage import collecting_later


def test_garbage_is_collected_once_a_command_has_started():
    with collecting_later() as collect:
        assert not gc.isenabled()
        collect()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    with pytest.raises(ValueError, match=r"^failed$"), collecting_later():
        raise ValueError("failed")
    assert gc.isenabled()
