"""The tools that a conversation has: declared together, called by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxmoe.agent.calculator import CALCULATOR
from mlxmoe.agent.folder import folder_tools
from mlxmoe.agent.tool import ERROR, Tool, cut
from mlxmoe.transcript import ToolCall


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Tools of distinct names; none is fine."""

    tools: tuple[Tool, ...] = ()

    @property
    def declarations(self) -> tuple[Mapping[str, Any], ...]:
        """The tools as a `Request` takes them."""
        return tuple(tool.declaration for tool in self.tools)

    def answer(self, call: ToolCall) -> str:
        """The result of a call, also of one that can't be done."""
        for tool in self.tools:
            if tool.name == call.name:
                return tool.answer(call)
        names = ", ".join(tool.name for tool in self.tools) or "none"
        return f"{ERROR}no tool {cut(call.name)}, there are: {names}"


def own_tools(root: Path) -> Toolbox:
    """The runner's own four: calculator, list_files, read_file, find_word, over `root`."""
    return Toolbox((CALCULATOR, *folder_tools(root)))
