"""Tests that .ci/pictures.py draws the committed pictures, and that every page shows both
themes."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = [
    (path.relative_to(ROOT), name, theme)
    for path in PAGES
    for name, theme in re.findall(r"pictures/(\w+)-(light|dark)\.svg", path.read_text())
]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / ".ci" / "pictures.py"), str(folder)]
    subprocess.run(command, env=env, check=True)
    return folder


def test_the_pictures_are_up_to_date(drawn):
    names = {path.name for path in drawn.iterdir()}
    assert {path.name for path in FOLDER.iterdir()} == names
    stale = [n for n in names if (FOLDER / n).read_bytes() != (drawn / n).read_bytes()]
    assert not stale, "run PYTHONPATH=. python .ci/pictures.py"


def test_every_picture_is_shown_in_both_themes():
    assert {f"{name}-{theme}.svg" for _, name, theme in SHOWN} == {p.name for p in FOLDER.iterdir()}
    for path, name, _ in SHOWN:
        themes = [theme for page, other, theme in SHOWN if (page, other) == (path, name)]
        assert sorted(themes) == ["dark", "light"], f"{path}: {name}"


def test_a_picture_has_a_description_and_stays_inside_its_frame(drawn):
    """Boxes and the start of each text must be inside the picture; overlong text is not
    detected.
    """
    for path in drawn.iterdir():
        root = ElementTree.parse(path).getroot()
        _, _, width, height = map(float, root.get("viewBox", "").split())
        assert root.findtext("{*}title")
        for element in root.iter():
            x, y = float(element.get("x", 0)), float(element.get("y", 0))
            right, bottom = x + float(element.get("width", 0)), y + float(element.get("height", 0))
            if element is not root:
                assert 0 <= x <= right <= width, f"{path.name}: {element.attrib}"
                assert 0 <= y <= bottom <= height, f"{path.name}: {element.attrib}"
