"""Published weights: manifest, publisher, subscriber, probe, fingerprints."""
