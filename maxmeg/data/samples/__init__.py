"""From a corpus to training samples: order, splits, blends, packing."""
