"""The how-to's example does what the text says."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

import fxmem.testing

TEXT = (Path(__file__).parents[2] / "docs/how-to/test-your-pass.md").read_text()


@pytest.fixture
def _unshrunk() -> Iterator[None]:
    """Shrinking takes most of the time, and the test does not look at it."""
    before = settings.get_current_profile_name()
    settings.register_profile("unshrunk", settings.get_profile(before), phases=[Phase.generate], max_examples=50)
    settings.load_profile("unshrunk")
    yield
    settings.load_profile(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_unshrunk")
def test_the_example_finds_the_seeded_bug_and_the_fixed_pass_passes() -> None:
    seeded, its_test, compiler_test = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict[str, object] = {"my_compiler": lambda module: module}
    exec(seeded + its_test + compiler_test, names)
    with pytest.raises(AssertionError, match="remove_unread changed what the graph does") as caught:
        names["test_remove_unread"]()
    printed = "\n".join(caught.value.__notes__)
    assert "graph_module(r'''" in printed
    fixed = re.search(r"`gm\.(graph\.eliminate_dead_code\(\))`", TEXT)
    assert fixed
    exec(f"def remove_unread(gm):\n    gm.{fixed[1]}\n    gm.recompile()\n", names)
    names["test_remove_unread"]()
    names["test_my_compiler"]()


def test_the_table_names_what_there_is() -> None:
    named = set(re.findall(r"`(check_\w+|\w+)\(", TEXT.split("| you write")[1].split("\n\n")[0]))
    assert named <= set(fxmem.testing.__all__)
    for name in fxmem.testing.__all__:
        assert getattr(fxmem.testing, name).__doc__
