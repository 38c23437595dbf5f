"""The demo model: a small trained Kimi K3.1 whose files lie beside this one.

`demo` names it wherever a model is asked for. It is loaded like any checkpoint; only what
nobody asked for has other defaults, since it is small: half of its experts in memory, so
that the others stream, a short context, and the most likely token.
"""

from dataclasses import replace
from pathlib import Path

from mlxmoe.budget import Settings
from mlxmoe.errors import CheckpointError

NAME = "demo"
FOLDER = Path(__file__).resolve().parent
SLOTS = 40  # experts in memory, of 80
CONTEXT = 4096  # tokens
TEMPERATURE = 0.0


def model_folder(model: str) -> Path:
    """The folder that `model` names: the demo's, or a path. A folder of one's own that is
    called demo is `./demo`. Raises CheckpointError when the demo's files are not there."""
    if model != NAME:
        return Path(model)
    if not (FOLDER / "config.json").is_file():
        raise CheckpointError(
            f"the demo model's files are not in {FOLDER}, expected config.json and more there. "
            "Install mlxmoe again, or name a folder of yours (one called demo is ./demo)"
        )
    return FOLDER


def fill_settings(model: str, settings: Settings) -> Settings:
    """`settings` with the demo's slots and context where `model` is the demo and they were
    left open; a budget of memory decides the slots itself."""
    if model != NAME:
        return settings
    if settings.ram is None and settings.slots is None:
        settings = replace(settings, slots=SLOTS)
    return replace(settings, context=CONTEXT if settings.context is None else settings.context)
