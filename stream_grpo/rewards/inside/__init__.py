"""What runs inside the code sandbox: standard library only, in an interpreter that `rewards.sandbox` starts."""
