"""Overwriting: which files of a folder are part of the checkpoint in it, and which are kept.

A folder is a checkpoint if tensors can be read from files directly in it. Only these files, their
index or metadata, and what reshard wrote with them are replaced. All other files and folders are
moved to the new folder:

    out/                            .out.reshard-partial/data/
        model.safetensors  replaced     model-00001-of-00002.safetensors
        config.json        replaced     config.json
        notes.txt          kept
        logs/              kept
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from reshard.checkpoint.formats.checks import is_distcp
from reshard.checkpoint.formats.reader import survey_catalog
from reshard.checkpoint.formats.safetensors.reader import find_index, index_files
from reshard.checkpoint.integrity.checksums import SIDECAR, load_checksums
from reshard.checkpoint.storage.local import COMMITTED, REQUEST, LocalStorage
from reshard.errors import ReshardError, TargetError
from reshard.text import quoted

_NUMBERED = re.compile(r"(.+)-\d+-of-(\d+\.\w+)")
_DISTCP = re.compile(r"__\d+_\d+\.distcp|(__\d+)?\.metadata")
_COMPANION = re.compile(
    r"(adapter_|generation_|preprocessor_|processor_|model_|feature_extractor_)?config\.json"
    r"|tokenizer[^/]*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|spiece\.model|chat_template\.[a-z]+"
)
"""Configs and tokenizers, which come with a checkpoint."""
_SAFETENSORS = (".safetensors", ".safetensors.index.json")
"""Endings of files that would be read together with other safetensors files."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """What happens to the content of a folder that is overwritten."""

    belongs: frozenset[str] = frozenset()
    """Paths of the files of the old checkpoint, which are deleted."""
    kept: tuple[str, ...] = ()
    """Names of other files and folders; folders end with a slash."""


def replaced_by(target: Path, files: Collection[str]) -> Replaced:
    """What these new files replace in a folder; TargetError if other data could be lost."""
    belongs = _belonging(target)
    for path in files:
        in_way = _in_way(target, path)
        if in_way is None or in_way in belongs:
            continue
        if in_way != path or not _COMPANION.fullmatch(path) or not (target / path).is_file():
            raise TargetError(
                f"{target}/{in_way} is no part of the checkpoint there, and the new one has a file "
                "of that name: move it away, or choose another target"
            )
        belongs |= {path}
    kept: list[str] = []
    for entry in sorted(os.scandir(target), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            if any(_others(Path(entry.path), belongs, f"{entry.name}/")):
                kept.append(f"{entry.name}/")
        elif entry.name not in belongs:
            kept.append(entry.name)
    _check_kept(target, kept, files)
    return Replaced(belongs, tuple(kept))


def _belonging(target: Path) -> frozenset[str]:
    """The files of the checkpoint in a folder."""
    with LocalStorage(str(target), depth=0) as storage:
        sizes: dict[str, int] = {}  # of the files that reshard wrote with the checkpoint
        with suppress(ReshardError):
            sums = load_checksums(storage)
            sizes = {path: known.size for path, known in sums.files.items()} if sums else {}
        paths = set()
        for path, size in sizes.items():
            with suppress(OSError):
                paths |= {path} if (target / path).stat().st_size == size else set()
        if not paths or len(paths) < len(sizes):
            # If reshard wrote the checkpoint, other files of tensors are not part of it.
            read = _read(target, storage, is_known=bool(sizes))
            paths |= read & sizes.keys() if sizes else read
    if any(map(is_distcp, paths)):
        paths |= {path.name for path in target.iterdir() if _DISTCP.fullmatch(path.name)}
    paths |= {SIDECAR, COMMITTED, REQUEST}
    return frozenset(path for path in paths if _in_way(target, path) == path)


def _read(target: Path, storage: LocalStorage, is_known: bool) -> set[str]:
    """The files from which tensors are read, with their index or metadata."""
    advice = "only a checkpoint is overwritten: choose another target, or move the folder away"
    try:
        catalog, _ = survey_catalog(storage)
    except (ReshardError, OSError) as error:
        reason = str(error).removeprefix(f"{target} ").removeprefix("is no checkpoint: ")
        raise TargetError(
            f"{target} holds no checkpoint directly in it ({reason}), and {advice}"
        ) from None
    if not catalog.tensors and not catalog.objects:
        raise TargetError(
            f"{target} holds no checkpoint (no tensor of its files can be read), and {advice}"
        )
    paths = {file.path for file in catalog.files}
    index = find_index(storage.list())
    with suppress(ReshardError):
        paths |= {index.path, *index_files(storage, index).values()} if index else set()
    # Files of tensors that nothing lists may be several checkpoints of one file each.
    tensors = [path for path in paths if not path.endswith(".json")]
    groups = {match.groups() if (match := _NUMBERED.fullmatch(p)) else p for p in tensors}
    is_listed = is_known or len(tensors) < len(paths)
    if catalog.format in ("safetensors", "torch") and len(groups) > 1 and not is_listed:
        some = " and ".join(quoted(path) for path in sorted(tensors)[:2])
        raise TargetError(
            f"{target} holds {some}, and nothing says that they are one checkpoint: {advice}"
        )
    return paths | ({".metadata"} if catalog.format == "distcp" else set())


def _in_way(target: Path, path: str) -> str | None:
    """What exists at a path: its first part that is not a folder, or the whole path.

    Links are not followed, so that nothing is deleted where they lead.
    """
    for some in accumulate(path.split("/"), "{}/{}".format):
        here = target / some
        if not os.path.lexists(here):
            return None
        if here.is_symlink() or not here.is_dir():
            return some
    return path


def _others(folder: Path, belongs: Collection[str], prefix: str) -> Iterator[str]:
    """Paths in a folder that are not part of the checkpoint; an empty folder is kept."""
    entries = list(os.scandir(folder))
    if not entries:
        yield prefix
    for entry in entries:
        path = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _others(Path(entry.path), belongs, f"{path}/")
        elif path not in belongs:
            yield path


def _check_kept(target: Path, kept: Collection[str], files: Collection[str]) -> None:
    """Refuse, before any work, files that readers would take for part of the new checkpoint, and
    files that cannot be moved at the end."""
    for name in kept if ".metadata" not in files else ():
        if name.endswith(_SAFETENSORS) or is_distcp(name):
            raise TargetError(
                f"{target}/{name} is no part of the checkpoint there, and would be read as a part "
                "of the new one: move it away, or choose another target"
            )
    device = target.stat().st_dev
    for path in (target, *(target / name for name in kept if name.endswith("/"))):
        if path.stat().st_dev != device:
            raise TargetError(f"{path} is a mount point and cannot be moved: unmount it first")
        if not os.access(path, os.W_OK | os.X_OK):
            raise TargetError(f"{path} may not be written: change its permissions")


def move_kept(old: Path, new: Path, belongs: Collection[str], prefix: str = "") -> None:
    """Move all that is not part of the old checkpoint to the new folder; may be repeated."""
    for entry in list(os.scandir(old)):
        path, goal = prefix + entry.name, new / entry.name
        if path in belongs:
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        shared = is_folder and any(one.startswith(f"{path}/") for one in belongs)
        if is_folder and (shared or goal.is_dir()):
            if any(_others(Path(entry.path), belongs, f"{path}/")):
                goal.mkdir(exist_ok=True)
                move_kept(Path(entry.path), goal, belongs, f"{path}/")
            continue
        if os.path.lexists(goal):  # created while the new one was published
            goal = goal.with_name(f"{goal.name}.kept-{secrets.token_hex(4)}")
        Path(entry.path).rename(goal)


def delete_files(folder: Path, belongs: Collection[str]) -> bool:
    """Delete these files and the folders that become empty; whether nothing is left."""
    for path in belongs:
        (folder / path).unlink(missing_ok=True)
    for here, _, _ in os.walk(folder, topdown=False):
        try:
            Path(here).rmdir()
        except OSError:  # something else is in it
            return False
    return True
