"""The exception for samples that are not encoded."""


class Reject(Exception):
    """Raised for a sample that will not be encoded, with a one-word reason for counters and a readable detail."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason

    def __reduce__(self) -> tuple[type["Reject"], tuple[str, str]]:
        return Reject, (self.reason, str(self))  # for pickling, because child processes send rejects to their parent
