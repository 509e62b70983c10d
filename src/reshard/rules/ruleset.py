"""Rules map tensor names to layouts: how every tensor of a model is sharded over a mesh.

>>> from reshard.layout.mesh import Mesh
>>> rules = Rules.load("llama", head_dim=128, kv_heads=8, num_layers=32)
>>> rules.layout("model.layers.3.self_attn.q_proj.weight", Mesh(tp=4))
Layout(Mesh(tp=4), 'tp*128 -')
>>> rules.layout("model.layers.31.mlp.down_proj.weight", Mesh(pp=2, tp=4))
Layout(Mesh(pp=2, tp=4), '- tp | on pp=1')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.errors import RulesError, require_type
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.rules.configs import check_config, family_of
from reshard.rules.document import Document, families, located, read, read_file
from reshard.rules.table import Table, idle_ranks


@dataclass(frozen=True)
class Rules:
    """Name patterns with a layout each, and the numbers of the model they need."""

    source: str
    """What errors call these rules: a family, a file, or the text itself."""
    document: Document = field(repr=False)
    _tables: dict[Mesh, Table] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def load(
        cls,
        source: str | Path | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        fsdp: str | None = None,
        replicate: str | None = None,
        **numbers: int,
    ) -> Rules:
        """The shipped rules of a model family, or a TOML file, with the numbers of a model.

        ``config`` is a Hugging Face ``config.json``; without a source it names the family. A number
        is taken from the arguments, else from the file, else from the config; else it is not known.

        >>> config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
        ...           "num_key_value_heads": 8, "num_hidden_layers": 32}
        >>> Rules.load("llama", config=config, num_layers=16).numbers
        {'heads': 32, 'kv_heads': 8, 'head_dim': 128, 'num_layers': 16, 'tied': 0}
        >>> Rules.load(config=config).source, Rules.load("llama").numbers["head_dim"]
        ('llama', None)
        """
        if source is None:
            if config is None:
                names = ", ".join(families())
                raise RulesError(f"no rules: name a file or one of {names}, or config=")
            source = family_of(config)
        if not isinstance(source, str | Path):
            raise RulesError(f"rules {source!r} are no text and no path: name a family or a file")
        rules = cls(str(source), read_file(source))
        return rules.given(config=config, fsdp=fsdp, replicate=replicate, numbers=numbers)

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        source: str = "rules",
        fsdp: str | None = None,
        replicate: str | None = None,
        **numbers: int,
    ) -> Rules:
        """Rules from TOML text.

        >>> rules = Rules.parse('axes = ["tp"]\\n[tensors]\\n"*.weight" = "tp -"')
        >>> str(rules.layout("a.weight", Mesh(tp=2)))
        'tp -'
        """
        require_type(text, str, "parse()", "give the text of a rules file; load() reads files")
        with located(source):
            rules = cls(source, read(text))
        return rules.given(fsdp=fsdp, replicate=replicate, numbers=numbers)

    def given(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        fsdp: str | None = None,
        replicate: str | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> Rules:
        """The same rules with more numbers of the model and other options, as in ``load``.

        >>> Rules.load("mixtral").given(numbers={"num_experts": 8}).numbers["num_experts"]
        8
        """
        config = {} if config is None else config
        check_config(config)
        with located(self.source):
            document = self.document.given(config, numbers or {}, fsdp, replicate)
        return Rules(self.source, document)

    @classmethod
    def for_config(cls, config: Mapping[str, Any], **options: Any) -> Rules:
        """Short for ``Rules.load(config=config)``."""
        return cls.load(config=config, **options)

    @staticmethod
    def families() -> tuple[str, ...]:
        """The names that ``load`` knows."""
        return families()

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the file, used where the caller names none."""
        return self.document.mesh

    @property
    def numbers(self) -> dict[str, int | None]:
        """The numbers of the model; None where one has not been given."""
        return dict(self.document.model)

    @property
    def names(self) -> Mapping[str, Any]:
        """Tensors that are called otherwise, or joined, in what is converted; as written."""
        return self.document.names

    def layout(
        self, name: str, mesh: Mesh | str | None = None, shape: Sequence[int] | None = None
    ) -> Layout:
        """The layout of one tensor; with its shape, the number of words is checked."""
        with located(self.source):
            table = self._table(mesh)
            layout = table.layout(name, None if shape is None else len(shape))
            if layout is None:
                raise table.unmatched([name])
        return layout

    def layouts(
        self, names: Iterable[str] | Mapping[str, Sequence[int]], mesh: Mesh | str | None = None
    ) -> dict[str, Layout]:
        """The layouts of many tensors, given by name or as {name: shape}."""
        with located(self.source):
            table = self._table(mesh)
            shapes = names if isinstance(names, Mapping) else None
            layouts: dict[str, Layout] = {}
            unmatched: list[str] = []
            for name in dict.fromkeys(names):
                try:
                    layout = table.layout(name, len(shapes[name]) if shapes else None)
                except RulesError:
                    if not unmatched:
                        raise
                    continue
                if layout is None:
                    unmatched.append(name)
                else:
                    layouts[name] = layout
            if unmatched:
                raise table.unmatched(unmatched)
        self.check_axes(layouts.values(), mesh)
        return layouts

    def check_axes(self, layouts: Iterable[Layout], mesh: Mesh | str | None = None) -> None:
        """Raise RulesError for an axis of the mesh that none of a model's layouts names.

        Along such an axis every rank would hold a copy of everything: it is misspelt, needs
        ``fsdp=``, or is meant, which ``replicate=`` says.
        """
        distinct = dict.fromkeys(layouts)
        with located(self.source):
            if distinct:
                named = {axis for layout in distinct for axis in layout.words.axes}
                self.document.check_axes(self._mesh_or_own(mesh), named)

    def check_mesh(self, mesh: Mesh | str) -> None:
        """Raise RulesError for an axis of a mesh that no rule names, whatever the model."""
        with located(self.source):
            self.document.check_axes(Mesh.of(mesh), self.document.rule_axes())

    def mesh_for(self, mesh: Mesh | str) -> Mesh:
        """The mesh that the layouts are written for: the same ranks in the same order.

        Where a model has fewer kv heads than tp has ranks, tp is read as kv groups of rep
        neighbours that hold the same kv heads.

        >>> Rules.load("llama", kv_heads=8).mesh_for(Mesh(dp=2, tp=16))
        Mesh(dp=2, kv=8, rep=2)
        """
        with located(self.source):
            return self.document.factored(Mesh.of(mesh))

    def notes(
        self,
        layouts: Mapping[str, Layout],
        shapes: Mapping[str, Sequence[int]],
        mesh: Mesh | str | None = None,
    ) -> list[str]:
        """What a reader should know of a model's layouts: axes read as two, ranks without a head.

        >>> rules = Rules.load("llama", kv_heads=8, head_dim=128)
        >>> shapes = {"layers.0.self_attn.q_proj.weight": (1024, 64)}
        >>> notes = rules.notes(rules.layouts(shapes, Mesh(tp=16)), shapes, Mesh(tp=16))
        >>> print(*(note[:64] for note in notes), sep="\\n")
        tp=16 is read as kv=8 rep=2, because kv_heads is 8: 2 neighbours
        warning: 8 of 16 ranks along kv, rep hold nothing of "layers.0.s
        """
        mesh = self._mesh_or_own(mesh)
        model, factors = self.document.model, self.document.factors
        with located(self.source):
            notes = [note for factor in factors for note in factor.notes(mesh, model)]
        return [*notes, *idle_ranks(layouts, shapes)]

    def fit(self, names: Iterable[str]) -> Rules:
        """The same rules with the numbers that were not given counted in all names of a model.

        >>> rules = Rules.load("llama").fit(["model.layers.0.mlp.up_proj.weight",
        ...                                  "model.layers.1.mlp.up_proj.weight"])
        >>> rules.numbers["num_layers"]
        2
        """
        names, numbers = list(names), dict[str, int]()
        for key, index in self.document.counts.items():
            patterns = [rule.pattern for rule in self.document.rules]
            counting = [one.regex for one in patterns if index in one.captures]
            matches = (regex.match(name) for name in names for regex in counting)
            largest = max((int(match[index]) for match in matches if match), default=-1)
            if self.document.model[key] is None and largest >= 0:
                numbers[key] = largest + 1
        return self.given(numbers=numbers)

    def _mesh_or_own(self, mesh: Mesh | str | None) -> Mesh:
        mesh = mesh or self.mesh
        if mesh is None:
            raise RulesError('no mesh: pass one, or write mesh = "dp=2 tp=4" into the file')
        return Mesh.of(mesh)

    def _table(self, mesh: Mesh | str | None) -> Table:
        mesh = self._mesh_or_own(mesh)
        if mesh not in self._tables:
            self._tables[mesh] = Table(self.document, self.mesh_for(mesh))
        return self._tables[mesh]
