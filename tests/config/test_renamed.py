"""Tests that old key names are refused with the new name, but accepted in files of earlier
versions, and that refused values in such files are reported with the override that helps.
"""

from pathlib import Path

import pytest

from sbpflow.checkpoint.format import Index
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.config.load import config_from_tree, load_config
from sbpflow.config.renamed import current_key, with_current_keys
from sbpflow.errors import ConfigError
from sbpflow.models.registry import MODELS
from sbpflow.run.saved.saved_model import saved_config


@pytest.mark.parametrize(
    ("override", "key", "current"),
    [
        ("parallel.exchange_dtype=bfloat16", "parallel.exchange_dtype", "parallel.comm_dtype"),
        (
            "parallel.tables={deep.*: {sbp: S(0), exchange_dtype: bfloat16}}",
            r"parallel.tables.deep.\*.exchange_dtype",
            r"parallel.tables.deep.\*.comm_dtype",
        ),
        ("parallel.row_capacity=0.5", "parallel.row_capacity", "parallel.row_buffer_fraction"),
    ],
)
def test_an_old_name_is_rejected_with_the_new_name(override, key, current):
    with pytest.raises(ConfigError, match=f"^{key} .* write {current}$"):
        load_config("configs/scheme3.yaml", [override], models=MODELS)


def test_saved_trees_and_keys_are_read_with_their_new_names():
    saved = {
        "data": {"path": "set"},
        "parallel": {
            "scheme": 3,
            "exchange_dtype": "bfloat16",
            "row_capacity": 0.5,
            "tables": {"*": {"sbp": "S(0)", "exchange_dtype": "float32"}},
        },
    }
    config = config_from_tree(with_current_keys(saved), models=MODELS)
    assert config.parallel.comm_dtype == "bfloat16"
    assert config.parallel.row_buffer_fraction == 0.5
    assert config.parallel.tables["*"].comm_dtype == "float32"
    assert "exchange_dtype" in saved["parallel"], "the given tree is not changed"
    assert with_current_keys({"parallel": None}) == {"parallel": None}
    assert current_key("parallel.exchange_dtype") == "parallel.comm_dtype"
    assert current_key("parallel.row_capacity") == "parallel.row_buffer_fraction"
    assert current_key("parallel.tables.a.b.exchange_dtype") == "parallel.tables.a.b.comm_dtype"
    assert current_key("run.exchange_dtype") == "run.exchange_dtype"


def test_a_saved_value_that_is_no_longer_accepted_is_refused_with_an_override():
    documents = {"config": {"train": {"plateau": {"min_factor": 1.0}}}}
    index = Index(step=5, run="r", tensors={}, files={}, documents=documents)

    def read(*overrides):
        checkpoint = Checkpoint(Path("step-5"), index)
        return saved_config(checkpoint, overrides, models=MODELS, own_model=None)

    key = "train.plateau.min_factor"
    advice = f"; step-5 has this value, so add an override to the command: {key}=VALUE"
    with pytest.raises(ConfigError, match=rf"^{key} must be > 0 and < 1, got 1\.0.*{advice}$"):
        read("data.batch_size=10")
    assert read(f"{key}=0.5").train.plateau.min_factor == 0.5
    with pytest.raises(ConfigError, match=r"^optimizer\.dense\.lr must be > 0 [^;]*$"):
        read(f"{key}=0.5", "optimizer.dense.lr=-1")
