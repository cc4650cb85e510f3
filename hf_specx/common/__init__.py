"""What every room stands on: errors, devices, the text of a batch, and what is known of architectures."""
