"""Text of clients: tokenizing, chat templates, detokenizing, stop strings, output parsers."""
