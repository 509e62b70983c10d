"""File names that Hugging Face's libraries give meaning to: weights, their indexes, companions.

>>> base_of(["adapter_model.safetensors"], ()), base_of(["shard-1-model.safetensors"], ())
('adapter_model', 'model')
>>> is_weights("pytorch_model-00001-of-00002.bin"), is_weights("training_args.bin")
(True, False)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["base_of", "is_companion", "is_weights"]

_BASES = {
    "adapter_model": "adapter_model",  # PEFT
    "diffusion_pytorch_model": "diffusion_pytorch_model",  # diffusers
    "model": "model",  # transformers
    "pytorch_model": "model",
}
_NAME = re.compile(rf"({'|'.join(_BASES)})(\.[A-Za-z]\w*)?(-\d+-of-\d+)?\.(safetensors|bin)")

_WEIGHTS = re.compile(
    r"((pytorch_model|adapter_model|diffusion_pytorch_model|consolidated)[^/]*\.(bin|pt|pth)"
    r"|tf_model[^/]*\.h5|flax_model[^/]*\.msgpack)(\.index\.json)?"
)

_COMPANION = re.compile(
    r"(adapter_|generation_|preprocessor_|processor_|model_|feature_extractor_)?config\.json"
    r"|tokenizer[^/]*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|spiece\.model|chat_template\.[a-z]+"
)


def base_of(
    files: Collection[str], others: Collection[str], config: Mapping[str, Any] | None = None
) -> str:
    """What a library calls the files of whole tensors that it loads from this folder.

    The names of the files say it, where all have one of the known names; else the config of an
    adapter or of a diffusers model that is stored beside them.
    """
    found = {match[1] if (match := _NAME.fullmatch(path)) else None for path in files}
    if len(found) == 1 and (name := found.pop()) is not None:
        return _BASES[name]
    if "adapter_config.json" in others and "config.json" not in others:
        return "adapter_model"
    return "diffusion_pytorch_model" if "_diffusers_version" in (config or {}) else "model"


def is_weights(path: str) -> bool:
    """Whether a file has the name of weights in another format, or of an index of such files.

    A checkpoint that is written anew has other values, names or dtypes than these files.
    """
    return _WEIGHTS.fullmatch(path.rpartition("/")[2]) is not None


def is_companion(path: str) -> bool:
    """Whether a file has the name of a config or a tokenizer, which come with a checkpoint."""
    return _COMPANION.fullmatch(path) is not None
