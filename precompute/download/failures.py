"""Why pictures did not come: img2dataset's error texts, gathered into kinds that a person can act on."""

import re
from collections import Counter

# kind: the texts of it (urllib's, http.client's, ssl's, our opener's and img2dataset's own), tried in this order
KINDS = {
    "robots": r"X-Robots-Tag",
    "private_address": r"private address",
    "too_large": r"^too large",
    "deadline": r"^deadline",
    "redirect_loop": r"infinite loop|Redirection to url",
    "not_http": r"unknown url type|no host given|InvalidURL|URL can't contain|nonnumeric port",
    "http_403": r"HTTP Error 403",
    "http_404": r"HTTP Error 404",
    "http_410": r"HTTP Error 410",
    "http_429": r"HTTP Error 429",
    "http_4xx": r"HTTP Error 4\d\d",
    "http_5xx": r"HTTP Error 5\d\d",
    "http_other": r"HTTP Error",
    "tls": r"SSL|CERTIFICATE|certificate|TLS",
    "dns": r"Name or service not known|name resolution|No address associated|getaddrinfo|'idna'",
    "timeout": r"timed out|Timeout",
    "refused": r"Connection refused",
    "cut": r"IncompleteRead|closed connection without|Connection reset|bytes read",
    "unreachable": r"unreachable|No route",
    "not_an_image": r"Image decoding error",
}


def kind_of(message: str) -> str:
    """The kind of failure that an error text speaks of; `other` where it fits none."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, message)), "other")


def count_kinds(messages: dict[str, int]) -> Counter[str]:
    """Error text → count, as in img2dataset's `status_dict`, summed by kind; successes are left out."""
    kinds: Counter[str] = Counter()
    for message, count in messages.items():
        if message != "success":
            kinds[kind_of(message)] += count
    return kinds
