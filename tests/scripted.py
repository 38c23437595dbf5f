"""A network that says what it is told, for answers that random weights never give.

Its state is the history of the timeline itself, kept like recurrent state: in an array
that a snapshot holds and that can't be trimmed. So it also shows what a session did.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from mlxmoe.answer import Limits
from mlxmoe.chat.kimi import KimiChat
from mlxmoe.checkpoint import Checkpoint
from mlxmoe.engine import Engine, Opened
from mlxmoe.events import Request
from mlxmoe.loader import OnProgress
from mlxmoe.models.state import OnLayer, Snapshot
from mlxmoe.transcript import Message
from networks import streamed

LAYERS = 4


class ScriptedState:
    """The ids seen, as an array."""

    def __init__(self) -> None:
        self.history = mx.zeros((0,), mx.int32)
        self._kept: list[Snapshot] = []

    @property
    def offset(self) -> int:
        """Tokens seen."""
        return self.history.shape[0]

    @property
    def ids(self) -> list[int]:
        """Tokens seen, as a list."""
        return [int(id) for id in self.history.tolist()]  # type: ignore[union-attr, arg-type]

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate."""
        return [self.history]

    def take(self) -> Snapshot:
        """A snapshot of now."""
        return Snapshot(self.offset, (self.history,))

    def keep(self) -> None:
        """Take a snapshot for `kept`."""
        self._kept.append(self.take())

    def kept(self) -> list[Snapshot]:
        """Snapshots since the last time asked."""
        kept, self._kept = self._kept, []
        return kept

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to what the snapshot holds."""
        (self.history,) = snapshot.held
        assert snapshot.tokens == self.offset


class ScriptedNetwork:
    """After a timeline it wants the token that `say` gives, by a logit of 50 against 0.

    `seconds` is how long each layer of a call takes.
    """

    def __init__(self, vocab: int, say: Callable[[list[int]], int], seconds: float = 0.0):
        self.vocab, self.say, self.seconds = vocab, say, seconds
        self.spans: list[int] = []
        self.states: list[ScriptedState] = []

    def make_state(self) -> ScriptedState:
        """An empty history."""
        self.states.append(ScriptedState())
        return self.states[-1]

    def hidden(
        self,
        ids: mx.array,
        state: ScriptedState,
        cuts: Sequence[int] = (),
        on_layer: OnLayer | None = None,
    ) -> mx.array:
        """ids: [T] -> the ids wanted after each, [T]."""
        wanted = []
        for at, token in enumerate(ids.tolist(), 1):  # type: ignore[arg-type]
            state.history = mx.concatenate([state.history, mx.array([token], mx.int32)])
            if at in cuts:
                state.keep()
            wanted.append(self.say(state.ids) if at == ids.shape[0] else 0)
        self.spans.append(ids.shape[0])
        for layer in range(1, LAYERS + 1):
            time.sleep(self.seconds)
            if on_layer:
                on_layer(layer, LAYERS)
        return mx.array(wanted)

    def logits(self, hidden: mx.array) -> mx.array:
        """[T] -> [T, vocabulary]."""
        return 50.0 * (mx.arange(self.vocab)[None] == hidden[:, None])


class Script:
    """Answers by the prompts they belong to; the longest prompt that fits decides.

    After an answer's end, or off its path, it says `end`.
    """

    def __init__(self, end: int):
        self._end = end
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """After `prompt` comes `answer`."""
        self._answers[tuple(prompt)] = tuple(answer)

    def __call__(self, timeline: list[int]) -> int:
        """The token after `timeline`."""
        fits = [p for p in self._answers if tuple(timeline[: len(p)]) == p]
        if not fits:
            return self._end
        prompt = max(fits, key=len)
        answer, said = self._answers[prompt], timeline[len(prompt) :]
        on_path = list(answer[: len(said)]) == said and len(said) < len(answer)
        return answer[len(said)] if on_path else self._end


def scripted_engine(
    checkpoint: Checkpoint, network: ScriptedNetwork, context: int = 4096, span: int = 64
) -> Engine:
    """An engine of the checkpoint's chat and files, with this network on top."""

    def open_model(on_progress: OnProgress) -> Opened:
        loaded = replace(streamed(checkpoint, 4), network=network)
        limits = Limits(context, span, 1, network.vocab)
        return loaded, KimiChat(checkpoint.manifest.folder), limits

    engine = Engine(open_model)
    engine.start()
    return engine


class Stage:
    """A scripted engine, its chat, and the script to fill in."""

    def __init__(self, checkpoint: Checkpoint, context: int = 4096, span: int = 64):
        self.chat = KimiChat(checkpoint.manifest.folder)
        (end,) = self.chat.stop_ids
        self.script = Script(end)
        self.network = ScriptedNetwork(self.chat.tokenizer.n_vocab, self.script)
        self.engine = scripted_engine(checkpoint, self.network, context, span)

    def prompt(self, request: Request) -> list[int]:
        """The ids of the request."""
        return list(self.chat.render(request).ids)

    def ids(self, request: Request, said: Message) -> list[int]:
        """The ids of `said` as an answer, as a history would render it, up to the message's
        closing marker: there the engine stops, before the end token."""
        rendered = self.chat.render(replace(request, messages=(*request.messages, said)))
        return list(rendered.ids[len(self.prompt(request)) : rendered.ends[-1] - 1])

    def teach(self, request: Request, said: Message) -> list[int]:
        """Let the network answer `request` so; the answer's ids."""
        ids = self.ids(request, said)
        self.script.add(self.prompt(request), ids)
        return ids

    def timeline(self) -> list[int]:
        """The session's tokens."""
        return self.engine.call(lambda runtime: list(runtime.session.tokens))
