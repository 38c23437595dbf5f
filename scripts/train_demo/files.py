"""Turns about the folder: list it, read a file, find a word, cope with what is missing."""

from train_demo.turns import Scene, Step, Turn, listing, plain_turn, result_of, tool_turn
from train_demo.wordings import ANSWERS
from train_demo.words import EXTENSIONS, KEYS


def list_turn(scene: Scene) -> Turn:
    """What a folder holds: one of the root's, or the root itself."""
    folders = scene.world.folders()
    if not folders or scene.random.random() < 0.4:
        folder, text = ".", scene.ask("list_root")
    else:
        folder = scene.random.choice(folders)
        text = scene.ask("list", folder=folder + scene.random.choice(("", "", "", "/")))
    if not scene.tools:
        return _no_tools(scene, text)
    names = listing(scene.world.names(folder))
    answer = f"Here are {names}." if folder == "." else f"{folder} has {names}."
    place = "this folder" if folder == "." else folder
    last = Step(
        scene.think("I have the list.", f"I see {names}. I name them in the same order."), answer
    )
    before = scene.think(
        f"I list {place}.", f"The user wants to know what is in {place}. I call list_files for it."
    )
    return tool_turn(scene, "list", text, before, ("list_files", folder), last)


def read_turn(scene: Scene) -> Turn:
    """The text of a file."""
    path = scene.random.choice(sorted(scene.world.files))
    text = scene.ask("read", file=path)
    if not scene.tools:
        return _no_tools(scene, text)
    content = scene.world.files[path]
    last = Step(
        scene.think("I have the text.", f"The text is: {content}\nI repeat it exactly."),
        f"{path} says:\n{content}",
    )
    before = scene.think(f"I read {path}.", f"The user wants the text of {path}. I read the file.")
    return tool_turn(scene, "read", text, before, ("read_file", path), last)


def value_turn(scene: Scene) -> Turn:
    """One value out of a settings file; now and then it is not in it."""
    path, found = _settings(scene)
    key = scene.random.choice(sorted(found))
    if scene.random.random() < 0.1:
        key = scene.random.choice([other for other in KEYS if other not in found])
    text = scene.ask("value", key=key, file=path)
    if not scene.tools:
        return _no_tools(scene, text)
    before = scene.think(
        f"I look for the {key} in {path}.",
        f"The user wants the {key} in {path}. I read the file and look for the line with {key}.",
    )
    last = Step(_value_thought(scene, key, found), _value_answer(key, path, found))
    if key in found:
        scene.seen[key] = (path, found[key])
    return tool_turn(scene, "value", text, before, ("read_file", path), last)


def find_turn(scene: Scene) -> Turn:
    """Where a word stands."""
    found = {word for text in scene.world.files.values() for word in text.split() if _plain(word)}
    words = [word for word in found if scene.lexicon.allows(word) or not scene.lexicon.fresh]
    there = bool(words) and scene.random.random() < 0.85
    word = scene.random.choice(sorted(words)) if there else scene.lexicon.word()
    text = scene.ask("find", word=scene.random.choice((word, word, word, f'"{word}"')))
    if not scene.tools:
        return _no_tools(scene, text)
    lines = result_of(scene.world, "find_word", word)
    before = scene.think(
        f"I search for {word}.",
        f"The user wants to know where {word} stands. I search all files with find_word.",
    )
    if lines == "no match":
        last = Step(
            scene.think("No match.", f"There is no match, so no file has the word {word}."),
            f"No file has the word {word}.",
        )
    else:
        paths = listing(list(dict.fromkeys(line.split(": ")[0] for line in lines.splitlines())))
        thought = f"The lines are: {lines}\nSo {word} is in {paths}."
        last = Step(scene.think(f"It is in {paths}.", thought), f"{word} is in {paths}.")
    return tool_turn(scene, "find", text, before, ("find_word", word), last)


def two_reads(scene: Scene) -> Turn:
    """Two files at once: two calls in one message."""
    first, second = scene.random.sample(sorted(scene.world.files), 2)
    text = scene.ask("two_reads", a=first, b=second)
    calls = Step(
        scene.think(
            f"Two files: {first} and {second}. I read both.",
            f"The user wants two files. The first is {first} and the second is {second}. "
            "I read both at once.",
        ),
        calls=(("read_file", first), ("read_file", second)),
    )
    a, b = scene.world.files[first], scene.world.files[second]
    last = Step(
        scene.think(
            "I have both texts.", f"The first text is: {a}\nThe second is: {b}\nI repeat both."
        ),
        f"{first} says:\n{a}\n{second} says:\n{b}",
    )
    return Turn("two", text, (calls, last))


def retry_turn(scene: Scene) -> Turn:
    """A file that is not there: look at the folder, and try again if one has its name."""
    path, wrong = _wrong_path(scene)
    text = scene.ask("read", file=wrong)
    folder, _, name = wrong.rpartition("/")
    folder = folder or "."
    first = Step(
        scene.think(f"I read {wrong}.", f"The user wants the text of {wrong}. I read the file."),
        calls=(("read_file", wrong),),
    )
    place = "the folder" if folder == "." else folder
    second = Step(
        scene.think(
            f"There is no {wrong}. I list {place}.",
            f"There is no file {wrong}. Maybe the name is a little wrong, so I list {place}.",
        ),
        calls=(("list_files", folder),),
    )
    names = listing(scene.world.names(folder))
    if path is None:
        last = Step(
            scene.think(
                f"{name} is not there.", f"I see {names}. None of them is like {name}. I say so."
            ),
            f"There is no {wrong}. I see {names}.",
        )
        return Turn("retry", text, (first, second, last))
    third = Step(
        scene.think(
            f"I read {path}.",
            f"I see {names}. The file {path} has almost the same name. I read it.",
        ),
        calls=(("read_file", path),),
    )
    content = scene.world.files[path]
    last = Step(
        scene.think("I have the text.", f"The text is: {content}\nI repeat it exactly."),
        f"There is no {wrong}, but {path} says:\n{content}",
    )
    return Turn("retry", text, (first, second, third, last))


def no_folder_turn(scene: Scene) -> Turn:
    """A folder that is not there: say what is."""
    taken = {*scene.world.folders(), *scene.world.names()}
    folder = next(word for word in iter(scene.lexicon.word, "") if word not in taken)
    text = scene.ask("list", folder=folder)
    names = listing(scene.world.names())
    steps = (
        Step(
            scene.think(
                f"I list {folder}.",
                f"The user wants to know what is in {folder}. I call list_files for it.",
            ),
            calls=(("list_files", folder),),
        ),
        Step(
            scene.think(
                f"There is no {folder}. I list the folder.",
                f"There is no folder {folder}. I list this folder to see what there is.",
            ),
            calls=(("list_files", "."),),
        ),
        Step(
            scene.think(f"{folder} is not there.", f"I see {names}, but no {folder}. I say so."),
            f"There is no {folder}. I see {names}.",
        ),
    )
    return Turn("retry", text, steps)


def recall_value(scene: Scene) -> Turn:
    """A value that was read earlier, asked for again."""
    key = scene.random.choice(sorted(scene.seen))
    path, value = scene.seen[key]
    reasoning = scene.think(
        f"It was {value}.",
        f"The user wants the {key} again. I look back: the {key} in {path} was {value}.",
    )
    text = scene.ask("again", key=key)
    return plain_turn("recall", text, reasoning, f"The {key} in {path} is {value}.")


def has_settings(scene: Scene) -> bool:
    """Whether there is a file with values."""
    return any(_is_settings(text) for text in scene.world.files.values())


def _settings(scene: Scene) -> tuple[str, dict[str, str]]:
    paths = [path for path, text in scene.world.files.items() if _is_settings(text)]
    path = scene.random.choice(sorted(paths))
    lines = scene.world.files[path].splitlines()
    return path, dict(line.split(": ", 1) for line in lines)


def _is_settings(text: str) -> bool:
    return all(": " in line for line in text.splitlines())


def _value_thought(scene: Scene, key: str, found: dict[str, str]) -> str:
    if key not in found:
        lines = ", ".join(found)
        return scene.think(f"It has no {key}.", f"The file has {lines}. It has no {key}. I say so.")
    value = found[key]
    return scene.think(
        f"The {key} is {value}.",
        f"The file has {', '.join(found)}. The line is {key}: {value}. So the {key} is {value}.",
    )


def _value_answer(key: str, path: str, found: dict[str, str]) -> str:
    if key not in found:
        return f"There is no {key} in {path}."
    return f"The {key} in {path} is {found[key]}."


def _wrong_path(scene: Scene) -> tuple[str | None, str]:
    """(the file that is meant, or None; the path that is asked for)."""
    path = scene.random.choice(sorted(scene.world.files))
    if scene.random.random() < 0.65:
        stem, _, extension = path.rpartition(".")
        other = scene.random.choice([each for each in EXTENSIONS if each != extension])
        return path, f"{stem}.{other}"
    folder = path.rpartition("/")[0]
    stems = {each.rpartition(".")[0] for each in scene.world.files}
    while True:
        wrong = f"{folder}/{scene.lexicon.filename()}" if folder else scene.lexicon.filename()
        if wrong.rpartition(".")[0] not in stems:
            return None, wrong


def _plain(word: str) -> bool:
    return word.isalpha() and len(word) > 2


def _no_tools(scene: Scene, text: str) -> Turn:
    reasoning = scene.think(
        "I have no file tools.",
        "This is about files, and I have no tools for them here. I can't look, so I say so.",
    )
    return plain_turn("no_tools", text, reasoning, ANSWERS["no_files"])
