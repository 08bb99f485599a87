"""The off-policy maths: five independent choices, each a pure function over tensors."""
