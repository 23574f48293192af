"""Captions for the demo's images, written from templates. Every caption is true, but many omit some facts."""

import numpy as np

from examples.shapes.scenes import Scene

# Name of a colour, shape, size or place → words that captions use for it. Repeated words are more likely to be chosen.
# Names that are not listed have no synonyms.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "circle", "disc"),
    "gray": ("gray", "grey"),
    "purple": ("purple", "purple", "violet"),
    "small": ("small", "little", "tiny"),
    "large": ("large", "big", "huge"),
    "top": ("top", "top middle"),
    "bottom": ("bottom", "bottom middle"),
    "center": ("center", "middle"),
    "top left": ("top left", "upper left"),
    "top right": ("top right", "upper right"),
    "bottom left": ("bottom left", "lower left"),
    "bottom right": ("bottom right", "lower right"),
}

# "a" becomes "an" before a vowel.
TEMPLATES: tuple[str, ...] = (
    "a {size} {colour} {shape} in the {place} on a {background} background",
    "a {size} {colour} {shape} at the {place} on a {background} background",
    "a {colour} {shape} in the {place}, {size}, on a {background} background",
    "{size} {colour} {shape}, {place}, {background} background",
    "a {background} background with a {size} {colour} {shape} in the {place}",
    "a picture of a {size} {colour} {shape} in the {place} against a {background} background",
    "in the {place} of a {background} picture there is a {size} {colour} {shape}",
    "one {size} {colour} {shape} on {background}, {place}",
    "a {size} {colour} {shape} on a {background} background",
    "a {colour} {shape} in the {place} on {background}",
    "a {size} {shape} in {colour}, placed at the {place}",
    "a {colour} {shape} on a {background} background",
)
FACTS = ("colour", "shape", "background", "size", "place")


def write_caption(scene: Scene, rng: np.random.Generator) -> str:
    """Write a true caption for the scene from a random template. It always states the colour and shape."""
    return fill(TEMPLATES[rng.integers(len(TEMPLATES))], scene, rng)


def fill(template: str, scene: Scene, rng: np.random.Generator) -> str:
    """Fill a template with the scene's facts, each expressed by a random synonym."""
    synonyms = {fact: SYNONYMS.get(name := getattr(scene, fact), (name,)) for fact in FACTS}
    words = {fact: names[rng.integers(len(names))] for fact, names in synonyms.items()}
    return _with_articles(template.format(**words))


def stated_facts(template: str) -> frozenset[str]:
    """Return the facts that a template states."""
    return frozenset(fact for fact in FACTS if "{" + fact + "}" in template)


def _with_articles(text: str) -> str:
    words = text.split(" ")
    for place, following in enumerate(words[1:]):
        if words[place] == "a" and following[0] in "aeiou":
            words[place] = "an"
    return " ".join(words)
