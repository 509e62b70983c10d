"""What tests of commands about checkpoints share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reshard import cli


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must be refused; what it says, in one line."""

    def run(*arguments: object) -> str:
        assert cli.run([str(argument) for argument in arguments]) == 2
        out, said = capsys.readouterr()
        assert out == ""
        assert said.count("\n") == 1, said
        assert "internal error" not in said
        return said

    return run
