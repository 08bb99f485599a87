"""The errors a caller can act on.

    StreamGrpoError
    |-- ConfigError         a setting, a file or a combination of them is refused before anything starts
    |-- JournalError        the journal on disk cannot be read or written as promised
    |-- LedgerError         the account of groups or tokens does not close
    |-- WeightsError        published weights are incomplete, damaged or of another model
    |   `-- ProbeError      loaded weights do not give the learner's logprobs
    |-- EvaluationError     an evaluation is not what was asked for: several versions, missing or foreign samples
    |-- EnvironmentFailedError  trajectories cannot go on: too many errors in a row, or no worker that starts
    |-- RewardError         responses cannot be scored: too many errors in a row, or no worker that starts
    |-- SandboxError        a program cannot be run as promised; never the program's own failure
    |-- CorrectionError     a correction of staleness is asked for and cannot act
    |-- GrammarError        a token was sampled that the learner's grammar does not leave to its draw
    |-- CheckpointError     a checkpoint is incomplete or not of this run
    |-- OrderError          a running run refuses an order, or nobody runs it
    |-- RankError           a rank of the learner lost another one; all start again from the newest checkpoint
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


class EnvironmentFailedError(StreamGrpoError):
    """The environment of a run cannot answer, so that nothing would be learnt; the message holds an error of it."""


class RewardError(StreamGrpoError):
    """Responses cannot be scored, so that the run would learn nothing; the message holds the first error."""


class CheckpointError(StreamGrpoError):
    """A checkpoint is incomplete or does not belong to this run."""


class OrderError(StreamGrpoError):
    """A running run refuses an order, or nobody runs it; the message says why and whether anything was done."""


class RunFailed(StreamGrpoError):
    """A part ended with an error that ends the run; the message names the part and the cause."""


class RankError(StreamGrpoError):
    """A rank of the learner lost another one; the message names who is missing."""


class SandboxError(StreamGrpoError):
    """A sandbox cannot start, answer or isolate as promised; the program that it was to run is not to blame."""


class CorrectionError(StreamGrpoError):
    """A correction of staleness is asked for and cannot act."""


class GrammarError(StreamGrpoError):
    """A token was sampled that the learner's grammar does not leave to its draw: its logprob there means nothing."""


class StallError(StreamGrpoError):
    """A wait reached its deadline; the message names who was waited for and why."""
