"""One error type, one line, five parts."""

from __future__ import annotations


class EsgrpoError(RuntimeError):
    """who, found, wanted, consequence, what to do; picklable, because it crosses Ray."""

    def __init__(self, who: str, found: str, wanted: str, consequence: str, todo: str):
        super().__init__(who, found, wanted, consequence, todo)

    def __str__(self) -> str:
        who, found, wanted, consequence, todo = self.args
        return f"esgrpo: {who}: {found} | wanted {wanted} | {consequence} | {todo}"


class ConfigError(EsgrpoError, ValueError):
    """A value under `segment` that cannot work."""


class HookError(EsgrpoError):
    """A hook that the run needs is not in place."""


class RunError(EsgrpoError):
    """A run that had begun ends: the driver adds how to resume it."""


class Terminated(EsgrpoError):
    """A SIGTERM ended the run; the line says what was saved."""
