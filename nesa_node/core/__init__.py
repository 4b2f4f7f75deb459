"""Types shared by all packages: identifiers, spans, errors, settings, logging, metrics."""
