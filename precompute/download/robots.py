"""Parsing of X-Robots-Tag headers, with which a server forbids uses of an image.

img2dataset's own check takes everything before the first colon of a header to be the name of a robot, so it misses the
opt-out in `noai, max-image-preview:large`.
"""

import re
from collections.abc import Iterable, Iterator

from precompute.download.config import RobotsConfig

ADDRESSED = re.compile(r"(?!max-|unavailable_after)([a-z*][^\s:]*)\s*:(.*)", re.DOTALL)
"""A robot's name and the first of the directives addressed to it. `max-image-preview` and `unavailable_after` are
directives with a value, and the colons in a date follow a digit or a space."""


def is_disallowed(headers: Iterable[str], config: RobotsConfig) -> bool:
    """Return whether the X-Robots-Tag headers of a response contain a disallowed directive for all robots or for this
    one. `none` means `noindex, nofollow`.

    Args:
        headers: the value of each header, such as `noai, max-image-preview:large` or `latentmill: noindex`.
    """
    disallowed = {directive.strip().lower() for directive in config.disallowed_directives}
    if "noindex" in disallowed:
        disallowed.add("none")
    robots = {"*", config.user_agent_token.strip().lower()}
    return any(
        robot in robots and directive in disallowed for header in headers for robot, directive in _directives(header)
    )


def _directives(header: str) -> Iterator[tuple[str, str]]:
    """Yield (robot, directive) for each directive in a header. The robot is `*` if the header names none."""
    robot = "*"
    for item in header.lower().split(","):
        directive = item.strip()
        if match := ADDRESSED.fullmatch(directive):
            robot, directive = match[1], match[2].strip()
        yield robot, directive
