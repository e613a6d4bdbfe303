"""Models that come with their data and their recipe."""
