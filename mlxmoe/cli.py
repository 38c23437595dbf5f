"""The command line: `mlxmoe run | chat | score | plan | info`.

Imports stand inside the functions, so that `--help` and `plan` load no mlx. Exit codes:
0 done, 1 failed, 2 misused, 130 interrupted.
"""

import json
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mlxmoe.errors import MlxmoeError, UsageError

app = typer.Typer(
    help="Run Kimi K3 and K3.1 Pro with their experts streamed from the disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[
    str, typer.Argument(help="Folder of a checkpoint in its published layout, or: demo.")
]
Ram = Annotated[
    str | None,
    typer.Option(
        help="Memory to use in all, like 96GB; the default leaves some free.", envvar="MLXMOE_RAM"
    ),
]
NumSlots = Annotated[
    int | None, typer.Option("--slots", help="Experts in memory, in all.", envvar="MLXMOE_SLOTS")
]
MaxSpan = Annotated[
    int | None,
    typer.Option(help="Prompt tokens that pass a layer together.", envvar="MLXMOE_MAX_SPAN"),
]
Context = Annotated[
    int | None, typer.Option(help="Tokens of context to make room for.", envvar="MLXMOE_CONTEXT")
]
Tier = Annotated[str, typer.Option(help="Thinking effort: low, high or max.")]
Think = Annotated[bool, typer.Option(help="Think before the answer.")]
ThinkingCap = Annotated[
    int | None, typer.Option(help="Most thinking tokens; low 8192, high 32768, max no cap.")
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate for a request.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 takes the most likely token.", show_default="1; 0 for the demo, which is tiny"
    ),
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def run(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint; the demo model without one.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(help="The question; - reads it from stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON file with a list of OpenAI-style tools.")
    ] = None,
    tier: Tier = "max",
    think: Think = True,
    thinking_cap: ThinkingCap = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens under this share of the top.")] = 0.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer here; repeatable.")] = None,
    ram: Ram = None,
    slots: NumSlots = None,
    max_span: MaxSpan = None,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt: reasoning dimmed, then the answer."""
    from mlxmoe import events, transcript

    model, prompt = _model_and_prompt(model, prompt)
    engine = _engine(model, ram, slots, max_span, context)
    from mlxmoe.verbs import check_tier, read_prompt, read_tools, run_request

    messages = [transcript.user(read_prompt(prompt))]
    if system:
        messages.insert(0, transcript.system(system))
    heat = _temperature(model, temperature)
    request = events.Request(
        messages=tuple(messages),
        tools=read_tools(tools),
        tier=check_tier(tier),
        thinking=think,
        thinking_cap=thinking_cap,
        sampling=events.Sampling(heat, top_p, top_k, min_p, seed, tuple(stop or ()), max_tokens),
    )
    raise typer.Exit(run_request(engine, request, as_json))


@app.command()
def chat(
    model: Model = "demo",
    folder: Annotated[Path, typer.Option(help="What the file tools may read.")] = Path("."),
    tools: Annotated[
        bool, typer.Option(help="Let the model use a calculator and read files in the folder.")
    ] = True,
    tier: Tier = "max",
    think: Think = True,
    thinking_cap: ThinkingCap = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    ram: Ram = None,
    slots: NumSlots = None,
    max_span: MaxSpan = None,
    context: Context = None,
) -> None:
    """Talk, with tools; each line of a stdin that is no terminal is a turn."""
    from mlxmoe import events
    from mlxmoe.agent.toolbox import Toolbox, own_tools

    if not folder.is_dir():
        raise UsageError(f"--folder {folder}: is no folder. Name one that the model may read")
    engine = _engine(model, ram, slots, max_span, context)
    from mlxmoe.dialogue import run_chat
    from mlxmoe.verbs import check_tier

    form = events.Request(
        messages=(),
        tier=check_tier(tier),
        thinking=think,
        thinking_cap=thinking_cap,
        sampling=events.Sampling(
            _temperature(model, temperature), seed=seed, max_tokens=max_tokens
        ),
    )
    toolbox = own_tools(folder) if tools else Toolbox()
    title = f"{model}, tier {tier}" if think else f"{model}, no thinking"
    raise typer.Exit(run_chat(engine, toolbox, form, title))


@app.command()
def score(
    model: Model,
    file: Annotated[Path | None, typer.Argument(help="Text to score.")] = None,
    ids: Annotated[Path | None, typer.Option(help="JSON list of token ids instead.")] = None,
    logits: Annotated[
        Path | None, typer.Option(help="Write float32 logits [T, V] to this safetensors file.")
    ] = None,
    ram: Ram = None,
    slots: NumSlots = None,
    max_span: MaxSpan = None,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Perplexity of a text, or logits of token ids."""
    engine = _engine(model, ram, slots, max_span, context)
    from mlxmoe.verbs import run_score

    raise typer.Exit(run_score(engine, file, ids, logits, as_json))


@app.command()
def plan(
    model: Model,
    ram: Ram = None,
    slots: NumSlots = None,
    max_span: MaxSpan = None,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """How the memory would be shared out, from the headers alone."""
    from mlxmoe.report import plan_lines, plan_values

    planned = _checkpoint(model).plan(_settings(model, ram, slots, max_span, context))
    _print(plan_values(planned), plan_lines(planned), as_json)


@app.command()
def info(model: Model, as_json: AsJson = False) -> None:
    """What a checkpoint is."""
    from mlxmoe.report import info_lines, info_values

    checkpoint = _checkpoint(model)
    _print(info_values(checkpoint), info_lines(checkpoint), as_json)


def _model_and_prompt(model: str | None, prompt: str | None) -> tuple[str, str]:
    """One word alone is the prompt, for the demo. Raises UsageError when there is no prompt."""
    from mlxmoe import demo

    if model is None:
        raise UsageError(
            'no prompt. Type one: mlxmoe run "hello", or mlxmoe run MODEL "your question"'
        )
    if prompt is not None:
        return model, prompt
    path = model.startswith(("./", "../", "/", "~"))
    if model == demo.NAME or path or os.path.isdir(model):
        what = "a model" if model == demo.NAME else "a path" if path else "a folder here"
        raise UsageError(
            f'{model} is {what}, and there is no prompt. Type: mlxmoe run {model} "your question", '
            f"or mlxmoe run demo {model!r} to ask the demo that"
        )
    return demo.NAME, model


def _temperature(model: str, given: float | None) -> float:
    from mlxmoe import demo

    if given is not None:
        return given
    return demo.TEMPERATURE if model == demo.NAME else 1.0


def _checkpoint(model: str) -> Any:
    from mlxmoe.checkpoint import open_checkpoint
    from mlxmoe.demo import model_folder

    return open_checkpoint(model_folder(model))


def _settings(
    model: str, ram: str | None, slots: int | None, max_span: int | None, context: int | None
) -> Any:
    from mlxmoe.budget import Settings, parse_size
    from mlxmoe.checkpoint import stream_width
    from mlxmoe.demo import fill_settings

    size = parse_size(ram) if ram is not None else None
    return fill_settings(model, Settings(size, slots, max_span, context, stream_width()))


def _engine(
    model: str, ram: str | None, slots: int | None, max_span: int | None, context: int | None
) -> Any:
    """An engine that is not loaded yet; every refusal of the plan comes before mlx does."""
    checkpoint = _checkpoint(model)
    planned = checkpoint.plan(_settings(model, ram, slots, max_span, context))
    from mlxmoe.linux import prepare

    prepare()
    from mlxmoe.engine import engine_for

    return engine_for(checkpoint, planned)


def _print(values: dict[str, Any], lines: list[str], as_json: bool) -> None:
    print(json.dumps(values) if as_json else "\n".join(lines), flush=True)


def main() -> NoReturn:
    """Run the command line and exit."""
    _mend_streams()
    try:
        typer.main.get_command(app)(prog_name="mlxmoe")
        code = 0
    except MlxmoeError as error:
        code = _fail(error, error.exit_code)
    except OSError as error:
        # Whatever was being written to can't take the rest at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = _fail(error, 1)
    sys.exit(code)


def _fail(error: Exception, code: int) -> int:
    """The error as one line on stderr, without what could drive a terminal."""
    line = " ".join(str(error).splitlines())
    print("mlxmoe: " + "".join(c for c in line if c.isprintable()), file=sys.stderr)
    return code


def _mend_streams() -> None:
    """A standard stream that was closed is None, and a locale may lack characters."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(handle, "w" if number else "r"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
