"""EngineCore: requests from submission to their last token. No torch."""
