"""X-Robots-Tag headers: directives with values, robots' names, and several headers."""

import pytest

from precompute.download.config import RobotsConfig
from precompute.download.opener import is_disallowed


@pytest.mark.parametrize(
    "headers",
    [
        ["noai"],
        ["NoIndex, nofollow"],
        ["none"],  # noindex and nofollow
        ["noai, max-image-preview:large"],
        ["max-image-preview: none, noai"],
        ["max-snippet:-1, max-video-preview: 0 ,noimageai"],
        ["noindex, unavailable_after: 25 Jun 2027"],
        ["unavailable_after: 25 Jun 2027 15:00:00 PST, noimageindex"],
        ["unavailable_after: Wed, 25 Jun 2027 15:00:00 GMT, noai"],
        ["unavailable_after: Wednesday, 25-Jun-27 15:00:00 GMT, noai"],
        ["unavailable_after: 2027-06-25T15:00:00+01:00, noai"],
        ["unavailable_after: 25 Jun 2027, 15:00:00, noai"],
        ["latentmill: noai"],
        ["LatentMill : nofollow, max-snippet:5, noai"],
        ["*: noai"],
        ["otherbot: nofollow, latentmill: noindex"],
        ["otherbot: all", "max-snippet:5", "noai"],
    ],
)
def test_disallowed(headers: list[str]) -> None:
    assert is_disallowed(headers, RobotsConfig())


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        [" , :,"],
        ["all, nofollow, max-image-preview:none"],
        ["unavailable_after: Wed, 25 Jun 2027 15:00:00 GMT"],
        ["otherbot: noai"],
        ["otherbot: max-image-preview:large, noai, unavailable_after: Wed, 25 Jun 2027 15:00:00 GMT, none"],
        ["latentmill: nofollow, otherbot: noindex", "otherbot: noai"],
    ],
)
def test_allowed(headers: list[str]) -> None:
    assert not is_disallowed(headers, RobotsConfig())


def test_the_config_chooses_the_directives() -> None:
    robots = RobotsConfig(user_agent_token="Mine", disallowed_directives=("NoAI",))
    assert is_disallowed(["noai"], robots) and is_disallowed(["mine: noai"], robots)
    assert not is_disallowed(["none, noindex", "latentmill: noai"], robots)
    assert not is_disallowed(["noai"], RobotsConfig(disallowed_directives=()))
