"""The pages, as a visitor has them: a real browser on the real service."""
