"""Why a sample is not encoded."""


class Reject(Exception):
    """A sample that will not be encoded: its reason, one word for counting, and the detail for a person."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason

    def __reduce__(self) -> tuple[type["Reject"], tuple[str, str]]:
        return Reject, (self.reason, str(self))  # as it crosses from a child process
