"""What a corpus contains, as text and as a page."""
