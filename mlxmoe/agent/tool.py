"""A tool as a value: what a model is told of it, and the work it stands for.

A model makes mistakes. What is wrong with a call is a result that it can read, a text
that begins with "error: ", and never an exception.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxmoe.transcript import ToolCall

ERROR = "error: "
# Results go into the prompt: a word of the model's in a message about it is cut there.
SHOWN_CHARACTERS = 60


def cut(text: str) -> str:
    """`text`, or its first 60 characters."""
    return text[:SHOWN_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of string parameters, all required, in the order in which `run` takes them.

    `run` returns the result as text, for its own troubles one that begins with "error: ".
    """

    name: str
    description: str
    parameters: tuple[str, ...]
    run: Callable[..., str]

    @property
    def declaration(self) -> Mapping[str, Any]:
        """The tool as Chat Completions declares it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {name: {"type": "string"} for name in self.parameters},
                    "required": list(self.parameters),
                },
            },
        }

    def answer(self, call: ToolCall) -> str:
        """The result of `call`, which is known to name this tool."""
        given = call.arguments
        if isinstance(given, str):
            return f"{ERROR}the arguments of {self.name} are not a JSON object"
        for name in self.parameters:
            if name not in given:
                return f"{ERROR}{self.name} needs {name}"
            if not isinstance(given[name], str):
                return f"{ERROR}{name} must be a string"
        for name in given:
            if name not in self.parameters:
                return f"{ERROR}{self.name} has no {cut(name)}, only {', '.join(self.parameters)}"
        return self.run(*(given[name] for name in self.parameters))
