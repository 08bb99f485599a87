"""Reading the journal of a run, also while it goes on: the account, the groups, their text."""
