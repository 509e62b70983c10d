"""Every behaviour of the original has a test or a reason, and the page says which."""

from __future__ import annotations

from tests.behaviours import PAGE, page_of, shown_by_id, table


def test_every_behaviour_has_a_test_or_a_reason() -> None:
    known, tests = table(), shown_by_id()
    numbers = [*known["same"], *known["better"]]
    assert len(numbers) == 101 + 3 + 33
    missing = [one for one in numbers if one not in tests and one not in known["note"]]
    assert not missing, f"no test carries {', '.join(missing)}"


def test_no_test_carries_an_unknown_id() -> None:
    known = table()
    assert not shown_by_id().keys() - {*known["same"], *known["better"]}


def test_the_page_names_the_tests_there_are() -> None:
    """Outcomes are those of the run that made the page; the names must be of today."""

    def without_outcomes(text: str) -> list[str]:
        return [line.rpartition(" | ")[0] for line in text.splitlines() if line.startswith("| ")]

    assert without_outcomes(PAGE.read_text()) == without_outcomes(page_of({})), (
        "run python -m tests.behaviours"
    )
