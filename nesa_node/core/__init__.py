"""Words that every part shares: identifiers, spans, errors, configuration."""
