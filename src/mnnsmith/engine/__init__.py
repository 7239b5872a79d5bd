"""The only room that talks to MNN, always in a child process."""
