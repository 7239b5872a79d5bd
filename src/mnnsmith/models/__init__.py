"""One file per Hugging Face model_type: config to graph."""
