"""How fast a run goes, what holds it up, and a picture of both."""
