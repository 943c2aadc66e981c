"""The device's side: workers, the model runner and the sampler."""
