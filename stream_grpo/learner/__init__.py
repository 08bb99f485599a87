"""The learner: leased groups in, new weights and checkpoints out."""
