"""Save and publish a pair: folders, model cards, repositories on the Hub, and the command that serves it by vLLM."""
