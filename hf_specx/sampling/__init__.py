"""From logits to tokens: processors, verification rules, their noise, and when a row stops."""
