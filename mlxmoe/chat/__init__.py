"""From transcripts to token ids and back: tokenizer, renderer, parser."""
