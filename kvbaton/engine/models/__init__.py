"""One readable file per model family."""
