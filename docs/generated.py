"""Parts of the site that come from the code: commands, names, benchmark reports, source index.

A page asks for one with a comment, such as `<!-- made of: commands -->`, which readers of the
repository do not see. The index of the source is written beside the pages, as `source/`.
"""

import gc
import html
import inspect
import re
import shutil
import tempfile
from importlib import import_module
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "benchmarks/reports"
MARKER = re.compile(r"^<!-- made of: (\w+) ?(.*?) -->$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)(\w?)")
REPORT_LINK = re.compile(r"\]\((?:\.\./)+benchmarks/reports/(\w+)\.md\)")
OTHER_LINK = re.compile(r"\]\((?:\.\./)+(CHANGELOG|CONTRIBUTING|README)\.md\)")


def setup(app):
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", mark_examples)
    app.connect("build-finished", write_source_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def fill(app, docname, source):
    """Replace the comments of a page, and links to files that the site has elsewhere."""
    text = MARKER.sub(lambda found: MAKERS[found[1]](*found[2].split()), source[0])
    text = REPORT_LINK.sub(r"](#report-\1)", text)
    source[0] = OTHER_LINK.sub(r"](#\1)", text)


def mark_examples(app, what, name, value, options, lines):
    """Show indented blocks of a docstring as they are, and words in single backticks as code."""
    marked, inside = [], False
    for before, line in zip(["", *lines], lines, strict=False):
        indented = line.startswith("  ")
        if indented and not inside and not before.strip() and not line.lstrip().startswith(">>>"):
            marked += ["::", ""]
        inside = indented or (inside and not line.strip())
        marked.append(line if indented else CODE.sub(_code, line))
    lines[:] = marked


def _code(found):
    return f"``{found[1]}``" + (f"\\ {found[2]}" if found[2] else "")


def commands():
    """Every command as click knows it: usage, help, arguments and options."""
    from reshard.cli import cli

    context = click.Context(cli, info_name="reshard", help_option_names=["-h", "--help"])
    parts = [_command(cli, context, "reshard")]
    for name, command in cli.commands.items():  # in the order of their use
        inner = click.Context(command, info_name=name, parent=context)
        parts.append(_command(command, inner, f"reshard {name}"))
    return "\n\n".join(parts)


def _command(command, context, title):
    usage = " ".join(command.collect_usage_pieces(context))
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    lines = [f"## {title}", "", f"```text\n{title} {usage}\n```", ""]
    for paragraph in paragraphs:
        verbatim = paragraph.startswith("\b\n")
        lines += [f"```text\n{paragraph[2:]}\n```" if verbatim else paragraph, ""]
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    records = filter(None, (one.get_help_record(context) for one in options))
    rows = [f"| `{_cell(option)}` | {_cell(text)} |" for option, text in records]
    return "\n".join([*lines, "| option | meaning |", "|---|---|", *rows])


def _cell(text):
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\|")


def names(module, *wanted):
    """The documentation of public names of a module, from their docstrings."""
    found = import_module(module)
    blocks = []
    for name in wanted:
        value = getattr(found, name)
        if inspect.isclass(value):
            kind = "exception" if issubclass(value, Exception) else "class"
        else:
            kind = "function" if callable(value) else "data"
        blocks.append(f".. auto{kind}:: {module}.{name}")
        if kind == "class":
            blocks[-1] += "\n   :members:"
    return "```{eval-rst}\n" + "\n\n".join(blocks) + "\n```"


def reports():
    """All benchmark reports, each with its target for links."""
    return "\n\n".join(
        f"(report-{path.stem})=\n{_shifted(path)}" for path in sorted(REPORTS.glob("*.md"))
    )


def file(name):
    """A Markdown file at the root of the repository, as a part of a page."""
    return f"({Path(name).stem})=\n{_shifted(ROOT / name).replace('](docs/', '](')}"


def _shifted(path):
    """The text of a Markdown file, with its headings one level lower."""
    return re.sub(r"^#", "##", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def source():
    """A link to the index of the source, which only the site has."""
    return '<p><a href="source/index.html">The index of the source of reshard itself</a></p>'


MAKERS = {one.__name__: one for one in (commands, names, reports, file, source)}

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ overflow-x: auto; background: #8882; padding: 1rem }}
:root {{ color-scheme: light dark }}
</style>
<p><a href="{home}">reshard</a></p>
{body}
</html>
"""


def write_source_index(app, error):
    """Write the index of the package's source beside the pages, as HTML."""
    if error is not None or app.builder.name != "html":
        return
    from markdown_it import MarkdownIt

    from reshard.index import build

    gc.freeze()  # else every collection also looks at all that Sphinx and torch have made
    target = Path(app.outdir) / "source"
    shutil.rmtree(target, ignore_errors=True)  # files that are gone have no page
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "index"
        build(ROOT / "src/reshard", made)
        for path in sorted(made.rglob("*")):
            if path.is_file():
                _publish(path, target / path.relative_to(made), markdown, len(target.parts))


def _publish(path, target, markdown, depth):
    """Copy a file of the index; a Markdown page becomes HTML, and so do links to one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        target = target.with_suffix(".html")
        body = re.sub(r'(href="[^":]*)\.md(["#])', r"\1.html\2", markdown.render(text))
        body = re.sub(r'href="[^":]*?([^"/:]+\.py)"', r'href="\1.html#source"', body)
        body = re.sub(r"<h(\d)>(.*?)</h\1>", _heading, body)
        home = "../" * (len(target.parts) - depth) + "index.html"
        text = PAGE.format(title=html.escape(path.name), home=home, body=body)
    elif path.name == "search.html":
        text = text.replace('.md"', '.html"').replace(".md#", ".html#")
    target.write_text(text, encoding="utf-8")


def _heading(found):
    """A heading with the name by which other pages link it."""
    slug = re.sub(r"[^\w\- ]", "", found[2].lower()).replace(" ", "-")
    return f'<h{found[1]} id="{slug}">{found[2]}</h{found[1]}>'
