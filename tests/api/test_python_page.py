"""Tests that the program in docs/python.md runs on the tutorial's table."""

import json
import re

import pytest

from tests.pages import ROOT, Page, follow

SHOW = """
import json
shown = [list(scores.columns), len(scores), figures["auc"], run.result["auc"], list(vectors.shape)]
open("shown.json", "w").write(json.dumps(shown))
"""


@pytest.mark.slow
def test_the_program_of_the_page_runs(tmp_path):
    tutorial = Page("docs/tutorial.md")
    tutorial.save_files(tmp_path)
    follow("python make_clicks.py", tmp_path)
    page = (ROOT / "docs" / "python.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "program.py").write_text(program + SHOW)
    follow("python program.py", tmp_path)
    columns, count, auc, test_auc, shape = json.loads((tmp_path / "shown.json").read_text())
    assert (columns, count) == (["row", "score"], 100)
    assert min(auc, test_auc) > 0.7
    assert shape[0] > 100
    assert shape[1] == 8
    assert (tmp_path / "out/notebook/scorer.py").is_file()
