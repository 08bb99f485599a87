"""The errors a caller can act on.

    StreamGrpoError
    |-- ConfigError         a setting, a file or a combination of them is refused before anything starts
    |-- JournalError        the journal on disk cannot be read or written as promised
    |-- LedgerError         the account of groups or tokens does not close
    |-- WeightsError        published weights are incomplete, damaged or of another model
    |   `-- ProbeError      loaded weights do not give the learner's logprobs
    |-- EvaluationError     an evaluation is not what was asked for: several versions, missing or foreign samples
    |-- CheckpointError     a checkpoint is incomplete or not of this run
    `-- StallError          a wait reached its deadline; the message names who was waited for

Bad arguments of a pure function are a plain ValueError.
"""


class StreamGrpoError(Exception):
    """Base of all errors that this project raises for its callers."""


class ConfigError(StreamGrpoError):
    """A setting, a file or a combination of settings is refused."""


class JournalError(StreamGrpoError):
    """The journal cannot be read or written as promised."""


class LedgerError(StreamGrpoError):
    """The account of groups or tokens does not close."""


class WeightsError(StreamGrpoError):
    """Published weights are incomplete, damaged or of another model."""


class ProbeError(WeightsError):
    """Loaded weights do not give the learner's logprobs on the probe."""


class EvaluationError(StreamGrpoError):
    """An evaluation is not what was asked for: more than one policy version, missing or foreign samples."""


class CheckpointError(StreamGrpoError):
    """A checkpoint is incomplete or does not belong to this run."""


class CorrectionError(StreamGrpoError):
    """A correction of staleness is asked for and cannot act."""


class StallError(StreamGrpoError):
    """A wait reached its deadline; the message names who was waited for and why."""
