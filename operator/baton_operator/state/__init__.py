"""What the operator knows of pools and their children, and how it is kept up to date."""
