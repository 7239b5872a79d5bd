"""Results as JSON, Markdown, JUnit XML, and in the bundle."""
