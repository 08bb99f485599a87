"""A pretrained model trained for an hour, in pieces, by this trainer and by TRL."""
