"""The command line, a command per file or a few that belong together.

    show         which rank holds which part of a tensor
    plan         ``plan`` and ``explore``; ``explore_server`` serves the page of the latter
    checkpoints  ``inspect``, ``convert``, ``verify`` and ``diff``; ``checkpoint_page`` is the page
                 of the first
    demo         plan, simulate, run and convert a model; ``demo_live`` starts its ranks
    source       ``index`` and ``bench``
    options      options that several commands take: shapes, meshes, layouts and models from text
    output       JSON, colours, progress bars, exit codes

Reports go to standard output, errors to standard error as one line. Exit codes: 0 done, 1 the
answer is no, 2 bad usage or input, 3 failed midway, 4 a checkpoint of a kind that is not supported,
130 interrupted. Only click is loaded here: every command loads what it needs when it runs, so that
``reshard --help`` is instant.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence

import click

from reshard.cli import checkpoints, demo, plan, show, source
from reshard.cli.options import add_common_options
from reshard.cli.output import ARGUMENTS, UNSUPPORTED, tolerant
from reshard.errors import ReshardError, UnsupportedError
from reshard.text import printable

__all__ = ["main", "run"]

BAD_INPUT = 2
INTERRUPTED = 130
TRACEBACK = "RESHARD_TRACEBACK"
"""The variable of the environment that asks for the lines of code behind an internal error."""
COMPLETION = "_RESHARD_COMPLETE"
"""The variable through which a shell asks for completion, as click has it."""
MAX_MESSAGE = 300

_OPTIONS = re.compile(r"(?<![\w-])(memory|mesh|rules)=(?![\w\"'])")
"""Arguments of Python functions that are options here."""
_EXAMPLE = re.compile(r"\x08\n\s*(reshard .*?)(?:  .*)?$", re.MULTILINE)
"""The first example of a command's help, without what it says about it."""
_TWICE = re.compile(r"(--([\w-]+)) \(\2=(?:True)?\)")
"""An option that a message names for Python as well."""
_LAYOUT = re.compile(r"-(\s.*)?\Z", re.DOTALL)
_ADVICE = {
    errno.ENOENT: ": check the path and its folder",
    errno.ENOTDIR: ": a part of the path is a file, and no folder",
    errno.EISDIR: ": name a file",
    errno.EACCES: ": check its permissions, or choose another place",
    errno.EROFS: ": choose another place",
}
"""What to try when the system refuses a file."""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.option("--version", is_flag=True, help="Print the version and leave.")
@click.pass_context
def cli(context: click.Context, version: bool) -> None:
    """Plan, inspect and convert sharded tensors and checkpoints."""
    if version:
        import reshard

        click.echo(f"reshard {reshard.__version__}")
    elif context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (
    *(show.show, plan.plan, plan.explore, checkpoints.inspect, checkpoints.convert),
    *(checkpoints.verify, checkpoints.diff, source.index, demo.demo, source.bench),
):
    add_common_options(_command)
    cli.add_command(_command)
add_common_options(cli)


def main() -> None:
    """Run the command line and leave with its exit code."""
    # Nothing here multiplies matrices, and starting threads for that takes a tenth of a second.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.stdout = sys.stdout and tolerant(sys.stdout)
    sys.stderr = sys.stderr and tolerant(sys.stderr)
    if COMPLETION in os.environ:
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, "reshard", COMPLETION, os.environ[COMPLETION]))
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; errors are printed, not raised."""
    if sys.stdout is None:  # started with standard output closed
        sys.stdout = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # A space keeps click from taking a layout such as "- tp" for an option.
    words = [f" {word}" if _LAYOUT.match(word) else word for word in arguments]
    flags: dict[str, bool] = {}
    try:
        with cli.make_context("reshard", [*words], obj=flags) as context:
            context.meta[ARGUMENTS] = arguments
            result = cli.invoke(context)
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        return _print_error(error.format_message() + _example(error, words))
    except UnsupportedError as error:
        return _print_error(str(error), UNSUPPORTED)
    except ReshardError as error:
        _trace(error, flags)
        return _print_error(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _print_error(f"{where}{error.strerror or error}{_ADVICE.get(error.errno or 0, '')}")
    except Exception as error:
        _trace(error, flags)
        what = f"{type(error).__name__}: {str(error)[:MAX_MESSAGE]}"
        return _print_error(
            f"internal error: {what}; please report it, with what {TRACEBACK}=1 shows"
        )


def _example(error: click.ClickException, arguments: Sequence[str]) -> str:
    """What to type instead: the first example of the command's help, or how to get the help."""
    if not isinstance(error, click.UsageError):
        return ""
    if isinstance(error, click.MissingParameter):
        example = _EXAMPLE.search((error.ctx and error.ctx.command.help) or "")
        return f" For example: {example[1]}" if example else ""
    if isinstance(error, click.BadParameter):  # it says what the value has to be
        return ""
    # click does not say of which command an option is that lacks its value.
    commands = [word for word in arguments[:1] if word in cli.commands]
    path = error.ctx.command_path if error.ctx else " ".join(["reshard", *commands])
    is_split = "unexpected extra" in error.message
    return f"{': a text with spaces needs quotes.' * is_split} Try {path} --help."


def _trace(error: Exception, flags: Mapping[str, bool]) -> None:
    if flags.get("verbose") or os.environ.get(TRACEBACK):
        import traceback

        traceback.print_exception(error)


def _print_error(message: str, code: int = BAD_INPUT) -> int:
    line = _OPTIONS.sub(r"--\1", _TWICE.sub(r"\1", " ".join(message.split())))
    print(f"reshard: {printable(line)}", file=sys.stderr)
    return code
