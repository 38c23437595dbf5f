"""Turns of arithmetic: at once where easy and the effort is low, else with the calculator."""

import re
from fractions import Fraction
from random import Random

from train_demo.turns import Scene, Step, Turn, plain_turn, result_of
from train_demo.wordings import ANSWERS, dress

_SIGNS = {
    "+": ("+", "+", "+", "plus"),
    "-": ("-", "-", "-", "minus"),
    "*": ("*", "*", "x", "times", "multiplied by"),
    "/": ("/", "/", "divided by", "over"),
}
_WORDED = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
# How a wording of `then` tells its sign; the first hint that is found decides.
_GO_ON = {
    "+": r"\b(add|plus|put)\b|\+",
    "*": r"\b(multipl\w+|times)\b|\*",
    "/": r"\bdivide\b",
    "-": r"\b(subtract|minus|take)\b|-",
}
_EASY_MOST = 10


def sum_turn(scene: Scene, easy: bool) -> Turn:
    """A sum. `easy`: two whole numbers up to 10."""
    expression, text = _asked(scene, easy)
    return answer_sum(scene, "easy_sum" if easy else "sum", text, expression)


def answer_sum(scene: Scene, kind: str, text: str, expression: str) -> Turn:
    """What to do about `expression`, however it was asked."""
    if not scene.tools:
        return _without_tools(scene, kind, text, expression)
    result = result_of(scene.world, "calculator", expression)
    if result.startswith("error"):
        return _by_zero(scene, kind, text, expression)
    scene.result = result
    answer = f"{expression} = {result}"
    if scene.effort in ("low", "off") and is_easy(expression):
        return plain_turn(kind, text, "", answer)
    first = Step(
        scene.think(
            f"A sum: {expression}. I call the calculator.",
            f"A sum: {expression}. I call the calculator, and then I check the result.",
        ),
        calls=(("calculator", expression),),
    )
    if scene.effort != "max":
        return Turn(kind, text, (first, Step(scene.think(f"It says {result}.", ""), answer)))
    check = f"{expression} - {result}"
    if "(" not in expression and result.startswith("-"):
        check = f"{expression} + {result[1:]}"
    zero = result_of(scene.world, "calculator", check)
    second = Step(
        f"The result is {result}. I check it: {check} must be 0.", calls=(("calculator", check),)
    )
    last = Step(f"The check gives {zero}. So {expression} = {result}.", answer)
    return Turn(kind, text, (first, second, last))


def _by_zero(scene: Scene, kind: str, text: str, expression: str) -> Turn:
    """A sum that the calculator refuses."""
    call = Step(
        scene.think(
            f"A sum: {expression}. I call the calculator.",
            f"A sum: {expression}. I call the calculator, and then I check the result.",
        ),
        calls=(("calculator", expression),),
    )
    reasoning = scene.think(
        "That can't be done.", "The calculator says that this is a division by zero. I say so."
    )
    return Turn(kind, text, (call, Step(reasoning, "I can't divide by zero.")))


def two_sums(scene: Scene) -> Turn:
    """Two sums at once: two calls in one message."""
    pair = [_possible(scene), _possible(scene)]
    asked = [_typed(scene, each) for each in pair]
    text = scene.ask("two_sums", a=asked[0], b=asked[1])
    results = [result_of(scene.world, "calculator", each) for each in pair]
    scene.result = None
    calls = Step(
        scene.think(
            f"Two sums: {pair[0]} and {pair[1]}. I call the calculator twice.",
            f"The user asks for two sums. The first is {pair[0]} and the second is {pair[1]}. "
            "I call the calculator twice.",
        ),
        calls=tuple(("calculator", each) for each in pair),
    )
    last = Step(
        scene.think(
            f"It says {results[0]} and {results[1]}.",
            f"The first result is {results[0]} and the second is {results[1]}. I give both.",
        ),
        "\n".join(f"{each} = {result}" for each, result in zip(pair, results, strict=True)),
    )
    return Turn("two", text, (calls, last))


def _possible(scene: Scene) -> str:
    while True:
        found = expression(scene, False)
        if not result_of(scene.world, "calculator", found).startswith("error"):
            return found


def follow_sum(scene: Scene) -> Turn:
    """A sum that goes on with the last result, which must be there."""
    number = scene.lexicon.whole(scene.random.choice((1, 1, 2, 2, 3)))
    number = "2" if number == "0" else number
    wording = scene.plain("then", n=number)
    sign = next(sign for sign, hint in _GO_ON.items() if re.search(hint, wording))
    text = dress(scene.random, wording)
    return answer_sum(scene, "follow", text, f"{scene.result} {sign} {number}")


def recall_sum(scene: Scene) -> Turn:
    """The last result, asked for again."""
    text = scene.ask("again_sum")
    reasoning = scene.think(
        f"It was {scene.result}.",
        f"The user wants the last result again. I look back: it was {scene.result}.",
    )
    return plain_turn("recall", text, reasoning, f"The result was {scene.result}.")


def is_easy(expression: str) -> bool:
    """Whether the model should know this by heart: two whole numbers up to 10, no division."""
    parts = expression.split(" ")
    if len(parts) != 3 or parts[1] == "/":
        return False
    if not all(part.isdigit() and int(part) <= _EASY_MOST for part in (parts[0], parts[2])):
        return False
    return parts[1] != "-" or int(parts[0]) >= int(parts[2])


def expression(scene: Scene, easy: bool) -> str:
    """A sum as the calculator takes it: numbers and signs apart by single spaces."""
    random, lexicon = scene.random, scene.lexicon
    if easy:
        return _easy(random)
    sign = random.choice("++--**/")
    a, b = lexicon.number(), lexicon.number()
    if sign == "-" and Fraction(b) > Fraction(a) and random.random() < 0.8:
        a, b = b, a
    if sign == "/":
        a, b = _divisible(scene)
    roll = random.random()
    if roll < 0.12:
        return f"{a} {sign} {b} {random.choice('+-*')} {lexicon.number()}"
    if roll < 0.18:
        return f"({lexicon.number()} {random.choice('+-')} {lexicon.number()}) * {b}"
    found = f"{a} {sign} {b}"
    return expression(scene, False) if is_easy(found) else found


def _easy(random: Random) -> str:
    a, b = random.randint(0, _EASY_MOST), random.randint(0, _EASY_MOST)
    sign = random.choice("+-*")
    if sign == "-" and b > a:
        a, b = b, a
    return f"{a} {sign} {b}"


def _divisible(scene: Scene) -> tuple[str, str]:
    """Mostly without a remainder; now and then by zero."""
    random = scene.random
    if random.random() < 0.04:
        return scene.lexicon.whole(random.choice((1, 2, 3))), "0"
    by = int(scene.lexicon.whole(random.choice((1, 1, 2, 2, 3)))) or 4
    if random.random() < 0.25:
        return scene.lexicon.whole(random.choice((2, 3, 4))), str(by)
    for _ in range(100):
        times = random.randint(2, 400)
        if len(str(by * times)) < 3 or scene.lexicon.allows(str(by * times)):
            return str(by * times), str(by)
    return scene.lexicon.whole(4), str(by)


def _asked(scene: Scene, easy: bool) -> tuple[str, str]:
    random = scene.random
    found = expression(scene, easy)
    parts = found.split(" ")
    if len(parts) == 3 and random.random() < 0.25:
        return found, scene.ask(_WORDED[parts[1]], a=parts[0], b=parts[2])
    return found, scene.ask("sum", sum=_typed(scene, found))


def _typed(scene: Scene, expression: str) -> str:
    """The same sum as somebody types it: other signs, spaces or none."""
    random = scene.random
    spelled = random.random() < 0.45
    if not spelled:
        return expression.replace(" ", "") if random.random() < 0.4 else expression
    signs = {sign: random.choice(ways) for sign, ways in _SIGNS.items()}
    return " ".join(signs.get(part, part) for part in expression.split(" "))


def _without_tools(scene: Scene, kind: str, text: str, expression: str) -> Turn:
    if not is_easy(expression):
        reasoning = scene.think(
            "I have no calculator.",
            f"A sum: {expression}. It is too hard for me alone, and I have no calculator. "
            "I say so.",
        )
        return plain_turn("no_tools", text, reasoning, ANSWERS["no_calculator"])
    a, sign, b = expression.split(" ")
    value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
    scene.result = str(value)
    reasoning = scene.think(
        "An easy sum.", f"An easy sum: {expression}. I have no calculator, but I know it: {value}."
    )
    return plain_turn(kind, text, reasoning, f"{expression} = {value}")
