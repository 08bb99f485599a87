"""The errors of the curator that a caller can act on.

    CuratorError
    |-- PoolError       a pool, or a file to be imported into one, is refused
    |-- SequenceError   outcomes arrive with a gap: the sender asks for the position and sends from there
    |-- SnapshotError   a file of the state cannot be used: all outcomes are folded instead
    `-- RowRefused      one row cannot become a problem; the import counts it

Bad arguments of a pure function are a plain ValueError.
"""


class CuratorError(Exception):
    """Base of all errors that the curator raises for its callers."""


class PoolError(CuratorError):
    """A pool, or a file to be imported into one, cannot be read or written as promised."""


class SequenceError(CuratorError):
    """An outcome is missing before the first one that arrived."""


class SnapshotError(CuratorError):
    """A file of the state cannot be used. The message is the reason."""


class RowRefused(CuratorError):
    """One row cannot become a problem. The message is the reason, equal for rows refused for the same reason."""
