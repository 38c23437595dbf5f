"""Turns without tools: greetings, who and what, thanks, and everything the demo can't do."""

from train_demo.turns import Scene, Turn, plain_turn
from train_demo.wordings import ANSWERS, TOPICS, spin

_THOUGHTS = {
    "greet": ("A greeting.", "The user greets me. I greet back and say what I can do."),
    "self": ("A question about me.", "The user asks who I am. I say what model I am."),
    "can": ("I say what I can do.", "The user asks what I can do. I list my four skills."),
    "thanks": ("The user is pleased.", "The user thanks me. There is nothing to do but be polite."),
    "bye": ("The user leaves.", "The user says goodbye. I say goodbye too."),
    "fallback": (
        "I can't do this.",
        "This is not a sum, not a folder, not a file and not a word to find. I can't do it, so I "
        "say so.",
    ),
}


def talk(scene: Scene, kind: str) -> Turn:
    """greet, self, can, thanks or bye."""
    return plain_turn(kind, scene.ask(kind), scene.think(*_THOUGHTS[kind]), ANSWERS[kind])


def fallback(scene: Scene) -> Turn:
    """Anything else: an honest word."""
    text = scene.plain("fallback")
    while "{topic}" in text:
        text = text.replace("{topic}", _topic(scene), 1)
    if scene.random.random() < 0.12 and not scene.lexicon.fresh:
        text = " ".join(scene.lexicon.word() for _ in range(scene.random.randint(1, 8)))
    text = _dressed(scene, text)
    return plain_turn("fallback", text, scene.think(*_THOUGHTS["fallback"]), ANSWERS["fallback"])


def _topic(scene: Scene) -> str:
    roll = scene.random.random()
    if roll < 0.35 and not scene.lexicon.fresh:
        return scene.random.choice(TOPICS)
    if roll < 0.8:
        return scene.lexicon.word()
    return f"{spin(scene.random, '(the|my|a|your|this|big|old|new)')} {scene.lexicon.word()}"


def _dressed(scene: Scene, text: str) -> str:
    text += scene.random.choice(("", "", "", "?", ".", "!", " please"))
    return text[0].upper() + text[1:] if scene.random.random() < 0.4 else text
