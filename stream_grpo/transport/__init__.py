"""What travels between the processes: Arrow records and the channels that carry them."""
