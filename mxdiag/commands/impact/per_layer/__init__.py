"""One layer, role or fused group quantized at a time, and what predicts its effect."""
