"""Other programs' words: one file a vocabulary, each of which turns what people already type into a Job."""
