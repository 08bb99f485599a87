"""Which recipe bears staleness: presets trained on the small model with an age that is imposed."""
