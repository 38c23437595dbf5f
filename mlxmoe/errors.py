"""What can go wrong, as one small tree.

    MlxmoeError            anything we raise on purpose: one line, no traceback
    ├── UsageError         what was typed can't be done (exit 2)
    │   ├── BudgetError    memory asked for is under the floor or over the machine
    │   └── PromptError    the prompt is empty, too long, or can't be rendered
    ├── CheckpointError    the files are missing, damaged or not what they claim (exit 1)
    ├── ReadError          bytes that were there at load can't be read now (exit 1)
    └── EngineError        the engine failed or was closed (exit 1)

A message says what was found, what was expected, and what to type next.
"""


class MlxmoeError(Exception):
    """Base of every error a person may see; `exit_code` is the process's."""

    exit_code = 1


class UsageError(MlxmoeError):
    """What was typed can't be done as asked."""

    exit_code = 2


class BudgetError(UsageError):
    """The memory asked for is under the floor, or more than the machine has."""


class PromptError(UsageError):
    """The prompt is empty, longer than the context, or can't be rendered."""


class CheckpointError(MlxmoeError):
    """A checkpoint's files are missing, damaged, or not what they claim to be."""


class ReadError(MlxmoeError):
    """Bytes that were there when the checkpoint was opened can't be read now."""


class EngineError(MlxmoeError):
    """The engine failed in the middle of a request, or was already closed."""
