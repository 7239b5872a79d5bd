"""Pictures and videos as vision-language models take them: loading, tiles, prompt text."""
