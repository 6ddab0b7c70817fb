"""Models on this machine: folders, the Hugging Face hub, the demo model."""
