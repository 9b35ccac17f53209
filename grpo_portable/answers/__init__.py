"""Numbers and expressions read from texts: the one extractor, and who is right."""
